"""Trees of a draft as lists, and what a node's place in them says."""

from __future__ import annotations


def trees_of(draft):
    """Return the tokens and the parents of each sequence's tree."""
    parts = (draft.token_ids, draft.parents)
    return list(zip(*([own.tolist() for own in part.split(draft.num_draft_tokens)] for part in parts), strict=True))


def paths_of(tokens, parents):
    """Return the tokens from the root to each node."""
    paths = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def is_depth_first(parents):
    """Whether every node follows its parent, or a descendant of one of its parent's other children."""
    open_nodes = [-1]
    for node, parent in enumerate(parents):
        while open_nodes and open_nodes[-1] != parent:
            open_nodes.pop()
        if not open_nodes:
            return False
        open_nodes.append(node)
    return True


def beginnings_of(continuations, max_nodes):
    """Return all beginnings of some continuations, until there are enough."""
    found = []
    for continuation in continuations:
        for length in range(1, len(continuation) + 1):
            text = tuple(continuation[:length])
            if text in found:
                continue
            if len(found) == max_nodes:
                break
            found.append(text)
    return found
