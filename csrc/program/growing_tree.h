// The tree of one sequence while it is drafted, level by level. specdec_fast/trees/growing.py states the rules; the names are
// the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "program/ranking.h"

namespace specdec {

constexpr std::int64_t kRoot = -1;  // the last committed token

// The nodes that all trees of a drafter have, as ranks of the tokens at their parents, the likeliest node first.
class StaticTree {
 public:
  // Every parent, an earlier node or kRoot, comes before its children. Throws std::invalid_argument otherwise.
  StaticTree(const std::vector<std::int64_t>& parents, const std::vector<std::int64_t>& ranks);

  // Returns the child of a node, or of the root, with a rank; kRoot if there is none.
  std::int64_t child(std::int64_t node, std::int64_t rank) const;
  bool has_children(std::int64_t node) const { return !children_[static_cast<std::size_t>(node + 1)].empty(); }
  // Returns the number of children to name for nodes `depth` levels below the root; 0 below the tree.
  std::int64_t num_ranks(std::int64_t depth) const;

 private:
  std::vector<std::vector<std::int64_t>> children_;  // of the root, then of every node: by rank, kRoot where there is none
  std::vector<std::int64_t> num_ranks_;              // by depth
};

// Where the nodes of trees are written, tree after tree.
struct DraftedNodes {
  std::int64_t* token_ids;
  std::int32_t* parents;  // within the tree, -1 for a child of the root
  float* scores;
};

// The best `max_nodes` of all children that were named. A node's score is the sum of the log-probabilities on its path, or
// with a static tree minus its place there. Nodes are numbered in the order in which they are added, so a parent precedes
// its children; a node outside of the best ones is never continued or written.
class GrowingTree {
 public:
  // `shape`: the static tree; null: none, and of each level the best `width` nodes are continued.
  GrowingTree(std::int64_t max_nodes, std::int64_t width, const StaticTree* shape);

  // The nodes whose children are wanted next, the best first; the root alone at first.
  const std::vector<std::int64_t>& frontier() const { return frontier_; }
  std::int64_t token(std::int64_t node) const { return nodes_[static_cast<std::size_t>(node)].token; }
  std::int64_t parent(std::int64_t node) const { return nodes_[static_cast<std::size_t>(node)].parent; }

  // Adds `num_ranks` children of every node of the frontier, and moves the frontier to the best of them.
  void add_children(const RankedToken* children, std::int64_t num_ranks);

  // The nodes of the frontier and those above them, parents first; and each one's parent as a place among them, or kRoot.
  void frontier_rows(std::vector<std::int64_t>& nodes, std::vector<std::int32_t>& parents) const;

  // Writes the tree, depth first, the best child first; returns its number of nodes.
  std::int64_t write(const DraftedNodes& to) const;

 private:
  struct Node {
    std::int64_t token, parent, place;  // place: in the static tree
    double score;
  };

  void add_child(std::int64_t parent, std::int64_t rank, const RankedToken& child);

  std::size_t max_nodes_, width_;
  const StaticTree* shape_;
  std::vector<Node> nodes_;
  std::vector<std::int64_t> best_, frontier_;
};

}  // namespace specdec
