"""The rule of BatchLLM for one level of common beginnings (Zheng et al., arXiv:2412.03594, section 4.2).

Prompts part in groups, each with one beginning. Where prompts have beginnings on several levels, a group further down
leaves the one above, and its beginning is read again from the start, if that spares tokens: a group of w prompts at d
tokens behind a node that is d_c tokens long spares (w - 1) d there, and costs d_c.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from millpond.engine.batch.tree import RadixTree


@dataclass(slots=True)
class _Group:
    """A node with prompts behind it; length: of what they have in common, from the node above on."""

    length: int
    prompts: int
    members: list[int | _Group] = field(default_factory=list)

    def flat(self) -> list[int]:
        """All prompts, in order of their discovery."""
        found: list[int] = []
        open_ = [iter(self.members)]
        while open_:
            one = next(open_[-1], None)
            if one is None:
                open_.pop()
            elif isinstance(one, _Group):
                open_.append(iter(one.members))
            else:
                found.append(one)
        return found


def one_level(tree: RadixTree, shortest: int) -> tuple[list[tuple[int, int, int]], list[int]]:
    """Beginnings that follow no other one.

    Args:
        shortest: tokens of a beginning, at least.

    Returns:
        Of each beginning a prompt that has it, its tokens, and -1; and of each prompt its beginning, -1 for none.
    """
    groups = _groups(tree)
    behind = [-1] * len(tree.node_of)
    trunks: list[tuple[int, int, int]] = []
    for group in groups:
        members = group.flat()
        if group.length < shortest or len(members) < 2:
            continue
        for prompt in members:
            behind[prompt] = len(trunks)
        trunks.append((members[0], group.length, -1))
    return trunks, behind


def _groups(tree: RadixTree) -> list[_Group]:
    """The groups directly behind the empty text."""
    depths, parents = tree.depth.tolist(), tree.parent.tolist()
    prompts: list[list[int]] = [[] for _ in depths]
    for prompt, node in enumerate(tree.node_of.tolist()):
        prompts[node].append(prompt)
    below: list[list[_Group]] = [[] for _ in depths]
    for node in range(len(depths) - 1, 0, -1):  # children come after their parents
        length = depths[node] - depths[parents[node]]
        members: list[int | _Group] = list(prompts[node])
        count = len(members)
        above = below[parents[node]]
        for group in below[node]:
            if (group.prompts - 1) * group.length > length:
                group.length += length
                above.append(group)
            else:
                members.append(group)
                count += group.prompts
        below[node] = []
        if len(members) == 1 and isinstance(members[0], _Group):  # nothing else is behind it
            members[0].length += length
            above.append(members[0])
        elif count == 1:
            prompts[parents[node]] += [one for one in members if isinstance(one, int)]
        elif members:
            above.append(_Group(length, count, members))
    return below[0]
