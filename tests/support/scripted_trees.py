"""A drafter of random trees, some of which hold the text that the target will emit."""

from __future__ import annotations

import random

import torch

import specdec_fast as sd
from specdec_fast.drafters.draft import draft_of_trees
from specdec_fast.trees.growing import TreeNodes
from support.models import VOCAB_SIZE


def random_tree(draw, text, depth, num_nodes, agreement):
    """Return tokens and parents of at most ``num_nodes`` nodes in random order, parents before their children.

    Args:
        draw: a ``random.Random``.
        text: the tokens that the target will emit next.
        depth: the largest depth.
        num_nodes: the largest number of nodes.
        agreement: how probable it is that a node continues the part of ``text`` that the tree holds.

    """
    tokens, parents, depths, taken = [], [], [], set()
    last, held = -1, 0  # the node up to which the tree holds the text, and its depth
    for _ in range(num_nodes):
        if held < min(len(text), depth) and draw.random() < agreement:
            parent, token = last, text[held]
        else:
            shallow = [node for node in range(len(tokens)) if depths[node] < depth]
            parent, token = draw.choice([-1, *shallow]), draw.randrange(VOCAB_SIZE)
        if (parent, token) in taken:
            continue
        if parent == last and held < len(text) and token == text[held]:
            last, held = len(tokens), held + 1
        taken.add((parent, token))
        tokens.append(token)
        parents.append(parent)
        depths.append(depths[parent] + 1 if parent >= 0 else 1)
    return tokens, parents


class RandomTrees(sd.TreeDrafter):
    """Proposes trees for most sequences, chains for some and nothing for others, in every step anew.

    Args:
        texts: by index of a request, the tokens that it will emit.
        agreement: see ``random_tree``.
        max_nodes: the largest number of nodes.
        seed: of the choices.

    """

    name = "random trees"

    def __init__(self, texts, agreement=0.5, max_nodes=14, seed=0):
        self.texts, self.agreement, self.max_nodes = texts, agreement, max_nodes
        self.draw = random.Random(seed)
        self.asked = []

    def propose_trees(self, sequences, limits, node_limits):
        self.asked.append((list(limits), list(node_limits)))
        asked = zip(sequences, limits, node_limits, strict=True)
        trees = [TreeNodes(*self.tree_for(*own), []) if own[1] else None for own in asked]
        return draft_of_trees(trees, torch.device("cpu"))

    def tree_for(self, sequence, depth, num_nodes):
        emitted = sequence.length - sequence.prompt_length
        text = self.texts[sequence.index][emitted : emitted + depth]
        kind = self.draw.choice(["tree", "tree", "tree", "tree", "chain", "nothing"])
        if kind == "tree":
            return random_tree(self.draw, text, depth, num_nodes, self.agreement)
        chain = text if kind == "chain" else []
        return chain, list(range(-1, len(chain) - 1))
