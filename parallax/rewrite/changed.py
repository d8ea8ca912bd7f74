"""Which gradients the graph does more with than to read them."""

from __future__ import annotations

import operator

from torch.fx import Node

from parallax.graph.aliases import is_given_away, writes_to
from parallax.ops.resources import wait_gradients
from parallax.rewrite.context import Rewriting


def note_changed_gradients(work: Rewriting) -> None:
    """Tell the runtime which sums must be this worker's own: others may read the same memory."""
    for node in work.graph.nodes:
        if node.target is wait_gradients:
            found = [user for user in node.users if user.target is operator.getitem]
            changed = tuple(sorted(int(str(one.args[1])) for one in found if _is_changed(one)))
            if changed:
                node.args = (node.args[0], changed)


def _is_changed(gradient: Node) -> bool:
    return is_given_away(gradient) or next(writes_to(gradient), None) is not None
