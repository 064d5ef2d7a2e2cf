#include "program/tree_drafting.h"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <stdexcept>
#include <string>

namespace specdec {

namespace {

// A tree in the making.
struct Growing {
  std::size_t member;
  GrowingTree tree;
  Span root;           // of one row
  std::int64_t token;  // of the root
  std::int64_t depth;  // the largest
  std::vector<std::int64_t> made;  // of each node that was in a frontier, the state of its row
};

// The inputs of later rows. State b is the input of root b, state B + b its hidden state, with B sequences; the hidden states
// of all nodes that were in a frontier follow.
class States {
 public:
  explicit States(std::size_t row_bytes) : bytes_(row_bytes) {}

  std::int64_t add(const char* row) {
    rows_.insert(rows_.end(), row, row + bytes_);
    return static_cast<std::int64_t>(rows_.size() / bytes_) - 1;
  }
  void append_to(std::vector<char>& inputs, std::int64_t state) const {
    const char* row = rows_.data() + static_cast<std::size_t>(state) * bytes_;
    inputs.insert(inputs.end(), row, row + bytes_);
  }

 private:
  std::size_t bytes_;
  std::vector<char> rows_;
};

// The rows of one forward over the frontiers of some trees.
struct Level {
  std::vector<Span> spans;
  std::vector<std::int64_t> token_ids, wanted;  // wanted: the rows of the frontiers
  std::vector<std::int32_t> parents;
  std::vector<char> inputs;
};

Level level_of(const std::vector<Growing*>& growing, const States& states, std::size_t num_sequences) {
  Level level;
  std::vector<std::int64_t> nodes, place;
  for (const Growing* each : growing) {
    const GrowingTree& tree = each->tree;
    tree.frontier_rows(nodes, level.parents);
    const auto root = static_cast<std::int64_t>(level.token_ids.size());
    level.spans.push_back({each->root.place, each->root.start, static_cast<std::int64_t>(nodes.size()) + 1});
    level.token_ids.push_back(each->token);
    states.append_to(level.inputs, static_cast<std::int64_t>(each->member));
    place.assign(static_cast<std::size_t>(nodes.back()) + 1, 0);
    for (const std::int64_t node : nodes) {
      place[static_cast<std::size_t>(node)] = static_cast<std::int64_t>(level.token_ids.size()) - root;
      level.token_ids.push_back(tree.token(node));
      const std::int64_t above = tree.parent(node);
      states.append_to(level.inputs, above == kRoot ? static_cast<std::int64_t>(num_sequences + each->member)
                                                    : each->made[static_cast<std::size_t>(above)]);
    }
    for (const std::int64_t node : tree.frontier()) level.wanted.push_back(root + place[static_cast<std::size_t>(node)]);
  }
  return level;
}

void check(const DraftRequest& draft, const TreeRules& rules, const Choice& choice) {
  check(draft, choice);
  const auto is_number = [](std::int64_t count) { return count > 0; };
  if (!(rules.greedy_temperature > 0.0)) {
    throw std::invalid_argument("the temperature of greedy requests is " + std::to_string(rules.greedy_temperature) +
                                "; expected a number above 0");
  }
  if (rules.num_nodes.size() != draft.spans.size() || rules.width < 1 || draft.carried.row_bytes < 1 ||
      !std::all_of(rules.num_nodes.begin(), rules.num_nodes.end(), is_number)) {
    throw std::invalid_argument("a draft of " + std::to_string(draft.spans.size()) + " trees has " +
                                std::to_string(rules.num_nodes.size()) + " numbers of nodes, a frontier of " +
                                std::to_string(rules.width) + " nodes and inputs of " +
                                std::to_string(draft.carried.row_bytes) + " bytes; each must be at least 1");
  }
}

// Drafts the trees of one call.
class TreeDrafting {
 public:
  TreeDrafting(Program& program, const Pages& pages, const DraftRequest& draft, const TreeRules& rules, const Choice& choice,
               int num_threads)
      : program_(program),
        pages_(pages),
        rules_(rules),
        row_bytes_(static_cast<std::size_t>(choice.width * item_size(choice.dtype))),
        num_threads_(num_threads),
        carried_(draft.carried, num_threads),
        ranker_(choice, rules.greedy_temperature, num_threads),
        states_(carried_.row_bytes()) {
    compute_roots(draft);
  }

  // Grows all trees by the levels that they may have.
  void grow() {
    std::vector<Growing*> growing;
    for (Growing& each : trees_) growing.push_back(&each);
    for (std::int64_t depth = 0; !growing.empty(); ++depth) {
      add_children(growing, depth);
      const auto is_done = [depth](const Growing* each) {
        return each->depth <= depth + 1 || each->tree.frontier().empty();
      };
      growing.erase(std::remove_if(growing.begin(), growing.end(), is_done), growing.end());
      if (!growing.empty()) compute_frontiers(growing);
    }
  }

  const std::vector<Growing>& trees() const { return trees_; }

 private:
  void compute_roots(const DraftRequest& draft) {
    const SpanLayout layout(pages_, draft.spans, SpanLayout::Logits::kLastRows);
    const std::size_t num_sequences = draft.spans.size();
    make_room(num_sequences);
    Forward forward = layout.forward(draft.token_ids.data(), logits_.get(), num_threads_);
    carried_.set(forward);
    program_.run(forward);
    const auto last_row = [&](std::size_t b) { return static_cast<std::size_t>(layout.cu_seqlens()[b + 1] - 1); };
    for (std::size_t b = 0; b < num_sequences; ++b) states_.add(carried_.input(last_row(b)));
    for (std::size_t b = 0; b < num_sequences; ++b) states_.add(carried_.hidden(last_row(b)));
    trees_.reserve(num_sequences);
    for (std::size_t b = 0; b < num_sequences; ++b) {
      const Span& span = draft.spans[b];
      trees_.push_back({b,
                        GrowingTree(rules_.num_nodes[b], rules_.width, rules_.shape),
                        {span.place, span.start + span.count - 1, 1},
                        draft.token_ids[last_row(b)],
                        draft.num_draft_tokens[b],
                        {}});
    }
  }

  // The logits are those of all frontiers' nodes.
  void add_children(const std::vector<Growing*>& growing, std::int64_t depth) {
    std::vector<std::size_t> members;
    for (const Growing* each : growing) members.insert(members.end(), each->tree.frontier().size(), each->member);
    const std::int64_t num_ranks = rules_.shape == nullptr ? rules_.width : rules_.shape->num_ranks(depth);
    const RankedToken* ranked = ranker_.rank(logits_.get(), members, depth, num_ranks).data();
    for (Growing* each : growing) {
      const auto num_parents = static_cast<std::int64_t>(each->tree.frontier().size());
      each->tree.add_children(ranked, num_ranks);
      ranked += num_parents * num_ranks;
    }
  }

  void compute_frontiers(const std::vector<Growing*>& growing) {
    const Level level = level_of(growing, states_, trees_.size());
    const SpanLayout layout(pages_, level.spans, SpanLayout::Logits::kLastRows, level.parents.data());
    make_room(level.wanted.size());
    Forward forward = layout.forward(level.token_ids.data(), logits_.get(), num_threads_);
    forward.logit_rows = level.wanted.data();
    forward.num_logit_rows = static_cast<std::int64_t>(level.wanted.size());
    carried_.take(level.inputs);
    carried_.set(forward);
    program_.run(forward);
    const std::int64_t* row = level.wanted.data();
    for (Growing* each : growing) {
      for (const std::int64_t node : each->tree.frontier()) {
        each->made.resize(std::max(each->made.size(), static_cast<std::size_t>(node) + 1));
        each->made[static_cast<std::size_t>(node)] = states_.add(carried_.hidden(static_cast<std::size_t>(*row++)));
      }
    }
  }

  void make_room(std::size_t num_logit_rows) {
    if (num_logit_rows <= room_) return;
    room_ = num_logit_rows;
    logits_.reset(new char[room_ * row_bytes_]);
  }

  Program& program_;
  const Pages& pages_;
  const TreeRules& rules_;
  std::size_t row_bytes_, room_ = 0;
  int num_threads_;
  Carried carried_;
  Ranker ranker_;
  States states_;
  std::unique_ptr<char[]> logits_;
  std::vector<Growing> trees_;
};

}  // namespace

std::vector<std::int64_t> draft_trees(Program& program, const Pages& pages, const DraftRequest& draft, const TreeRules& rules,
                                      const Choice& choice, int num_threads, const DraftedNodes& to) {
  check(draft, rules, choice);
  TreeDrafting drafting(program, pages, draft, rules, choice, num_threads);
  drafting.grow();
  std::vector<std::int64_t> counts;
  std::int64_t first = 0;
  for (const Growing& each : drafting.trees()) {
    counts.push_back(each.tree.write({to.token_ids + first, to.parents + first, to.scores + first}));
    first += counts.back();
  }
  return counts;
}

}  // namespace specdec
