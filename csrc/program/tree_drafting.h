// All forwards of a drafter's layers that draft one tree per sequence, in one call. specdec_fast/drafters/eagle3/tree.py
// states the rules.
#pragma once

#include <cstdint>
#include <vector>

#include "program/drafting.h"
#include "program/growing_tree.h"
#include "program/program.h"
#include "program/spans.h"

namespace specdec {

struct TreeRules {
  std::vector<std::int64_t> num_nodes;  // of each tree at most, at least 1
  std::int64_t width;  // the most nodes of a frontier; in a dynamic tree each of them also gets this many children
  const StaticTree* shape;    // null: trees follow the scores
  double greedy_temperature;  // see Ranker
};

// The first forward computes `draft.spans`; the last row of each is the root of its sequence's tree. Each further forward
// computes the frontiers of all trees that may be deeper, and the nodes above them. These rows take the root's slot and the
// slots after it; a tree never needs more slots after the root than it may have nodes. A row's input is the hidden state of
// its parent; the root keeps its input of the first forward.
//   draft: `num_draft_tokens` are the largest depths. The program takes inputs.
//   choice: may have no penalties.
// Writes the nodes, tree after tree; returns the number of nodes of each.
// Throws std::invalid_argument or std::out_of_range if the arguments do not fit together.
std::vector<std::int64_t> draft_trees(Program& program, const Pages& pages, const DraftRequest& draft, const TreeRules& rules,
                                      const Choice& choice, int num_threads, const DraftedNodes& to);

}  // namespace specdec
