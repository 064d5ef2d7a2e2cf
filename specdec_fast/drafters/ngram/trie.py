"""Several continuations of one sequence as one tree: equal beginnings are merged."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many


def trie(proposals: Iterable[Many[int]], max_nodes: int) -> tuple[list[int], list[int]]:
    """Merge continuations into a tree without equal siblings (``Draft.parents``).

    Args:
        proposals: continuations, the likeliest first. Once the tree is full, later ones add nothing.
        max_nodes: the largest number of nodes.

    Returns:
        Tokens and parents of the nodes, depth first. Children are in the order in which the proposals named them, so
        the first proposal is the path of the first nodes, whose KV entries need no move.
    """
    children: list[dict[int, int]] = [{}]  # of the root and of every node added: from a token to the node
    for proposal in proposals:
        node = 0
        for token in proposal:
            if token not in children[node]:
                if len(children) > max_nodes:
                    break
                children[node][token] = len(children)
                children.append({})
            node = children[node][token]
    tokens: list[int] = []
    parents: list[int] = []
    to_visit = [(token, node, -1) for token, node in reversed(children[0].items())]
    while to_visit:
        token, node, parent = to_visit.pop()
        place = len(tokens)
        tokens.append(token)
        parents.append(parent)
        to_visit += [(token, child, place) for token, child in reversed(children[node].items())]
    return tokens, parents
