#include "program/growing_tree.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace specdec {

StaticTree::StaticTree(const std::vector<std::int64_t>& parents, const std::vector<std::int64_t>& ranks)
    : children_(parents.size() + 1) {
  if (ranks.size() != parents.size()) {
    throw std::invalid_argument("a static tree of " + std::to_string(parents.size()) + " nodes has " +
                                std::to_string(ranks.size()) + " ranks");
  }
  std::vector<std::size_t> depths;
  for (std::size_t node = 0; node < parents.size(); ++node) {
    const std::int64_t parent = parents[node];
    if (parent < kRoot || parent >= static_cast<std::int64_t>(node) || ranks[node] < 0) {
      throw std::invalid_argument("node " + std::to_string(node) + " of a static tree has the parent " +
                                  std::to_string(parent) + " and the rank " + std::to_string(ranks[node]) +
                                  "; expected -1 or an earlier node, and a rank from 0 on");
    }
    depths.push_back(parent == kRoot ? 0 : depths[static_cast<std::size_t>(parent)] + 1);
    const auto rank = static_cast<std::size_t>(ranks[node]);
    std::vector<std::int64_t>& siblings = children_[static_cast<std::size_t>(parent + 1)];
    siblings.resize(std::max(siblings.size(), rank + 1), kRoot);
    siblings[rank] = static_cast<std::int64_t>(node);
    num_ranks_.resize(std::max(num_ranks_.size(), depths.back() + 1));
    num_ranks_[depths.back()] = std::max(num_ranks_[depths.back()], ranks[node] + 1);
  }
}

std::int64_t StaticTree::child(std::int64_t node, std::int64_t rank) const {
  const std::vector<std::int64_t>& children = children_[static_cast<std::size_t>(node + 1)];
  return static_cast<std::size_t>(rank) < children.size() ? children[static_cast<std::size_t>(rank)] : kRoot;
}

std::int64_t StaticTree::num_ranks(std::int64_t depth) const {
  return static_cast<std::size_t>(depth) < num_ranks_.size() ? num_ranks_[static_cast<std::size_t>(depth)] : 0;
}

GrowingTree::GrowingTree(std::int64_t max_nodes, std::int64_t width, const StaticTree* shape)
    : max_nodes_(static_cast<std::size_t>(max_nodes)),
      width_(static_cast<std::size_t>(width)),
      shape_(shape),
      frontier_{kRoot} {}

void GrowingTree::add_child(std::int64_t parent, std::int64_t rank, const RankedToken& child) {
  if (!(child.log_prob > -std::numeric_limits<double>::infinity())) return;  // a NaN is left out as well
  const double above = parent == kRoot ? 0.0 : nodes_[static_cast<std::size_t>(parent)].score;
  if (shape_ == nullptr) {
    nodes_.push_back({child.token, parent, kRoot, above + std::min(child.log_prob, 0.0)});
    return;
  }
  const std::int64_t place = shape_->child(parent == kRoot ? kRoot : nodes_[static_cast<std::size_t>(parent)].place, rank);
  if (place != kRoot) nodes_.push_back({child.token, parent, place, -static_cast<double>(place + 1)});
}

void GrowingTree::add_children(const RankedToken* children, std::int64_t num_ranks) {
  const auto first = static_cast<std::int64_t>(nodes_.size());
  for (const std::int64_t parent : frontier_) {
    for (std::int64_t rank = 0; rank < num_ranks; ++rank) add_child(parent, rank, *children++);
  }
  for (auto node = first; node < static_cast<std::int64_t>(nodes_.size()); ++node) best_.push_back(node);
  // Of equal scores the earlier node: a parent comes before its children.
  std::sort(best_.begin(), best_.end(), [this](std::int64_t one, std::int64_t other) {
    const double first_score = nodes_[static_cast<std::size_t>(one)].score;
    const double other_score = nodes_[static_cast<std::size_t>(other)].score;
    return first_score != other_score ? first_score > other_score : one < other;
  });
  if (best_.size() > max_nodes_) best_.resize(max_nodes_);
  frontier_.clear();
  for (const std::int64_t node : best_) {
    if (frontier_.size() == width_) break;
    const bool goes_on = shape_ == nullptr || shape_->has_children(nodes_[static_cast<std::size_t>(node)].place);
    if (node >= first && goes_on) frontier_.push_back(node);
  }
}

void GrowingTree::frontier_rows(std::vector<std::int64_t>& nodes, std::vector<std::int32_t>& parents) const {
  std::vector<std::int32_t> places(nodes_.size(), -1);
  for (std::int64_t node : frontier_) {
    for (; node != kRoot && places[static_cast<std::size_t>(node)] < 0; node = parent(node)) {
      places[static_cast<std::size_t>(node)] = 0;
    }
  }
  nodes.clear();
  for (std::size_t node = 0; node < nodes_.size(); ++node) {
    if (places[node] < 0) continue;
    const std::int64_t above = nodes_[node].parent;
    places[node] = static_cast<std::int32_t>(nodes.size());
    nodes.push_back(static_cast<std::int64_t>(node));
    parents.push_back(above == kRoot ? -1 : places[static_cast<std::size_t>(above)]);
  }
}

std::int64_t GrowingTree::write(const DraftedNodes& to) const {
  std::vector<std::pair<std::int64_t, std::int32_t>> waiting;  // a node, and the place of its parent
  const auto wait_for_children = [&](std::int64_t parent, std::int32_t place) {  // the best one last, as it is taken first
    for (auto node = best_.rbegin(); node != best_.rend(); ++node) {
      if (nodes_[static_cast<std::size_t>(*node)].parent == parent) waiting.emplace_back(*node, place);
    }
  };
  wait_for_children(kRoot, -1);
  std::int64_t count = 0;
  while (!waiting.empty()) {
    const auto [node, place] = waiting.back();
    waiting.pop_back();
    wait_for_children(node, static_cast<std::int32_t>(count));
    to.token_ids[count] = nodes_[static_cast<std::size_t>(node)].token;
    to.parents[count] = place;
    to.scores[count] = static_cast<float>(nodes_[static_cast<std::size_t>(node)].score);
    ++count;
  }
  return count;
}

}  // namespace specdec
