"""Another builder's strategy with encoded gradients."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from parallax.errors import ConfigError
from parallax.strategy.builders.base import ClusterFacts, GraphFacts, StrategyBuilder
from parallax.strategy.builders.hybrid import Hybrid
from parallax.strategy.data import Strategy, VariableStrategy
from parallax.strategy.registry import facts


class Encoded(StrategyBuilder):
    """What another builder decides, with dense gradients encoded while they travel.

    All gradients are encoded whose synchroniser can sum encoded values.
    """

    def __init__(
        self,
        encoder: str,
        base: StrategyBuilder | str | None = None,
        *,
        rows: bool = False,
        **options: float,
    ) -> None:
        """
        Args:
            encoder: its name.
            base: the other builder, or its name; HYBRID if None.
            rows: rows of tables are encoded as well, where their synchroniser can send them so.
            options: of the encoder, where they differ from its defaults.

        Raises:
            ConfigError: ``base`` is no builder, and no name of one.
        """
        if isinstance(base, str):
            from parallax.strategy.builders import find_builder  # which knows this one too

            base = find_builder(base)
        if not isinstance(base, StrategyBuilder | None):
            raise ConfigError(
                f"Encoded takes a strategy builder or its name, found {type(base).__name__}.",
                hint='for example Encoded("bf16", "ZeRO").',
            )
        self.encoder = encoder
        self.base = base or Hybrid()
        self.rows = rows
        self.options = options
        self.arranges_messages = self.base.arranges_messages

    @property
    def title(self) -> str:
        """Its name, for people."""
        return f"{self.base.title}, {self.encoder}"

    def build(self, graph: GraphFacts, cluster: ClusterFacts) -> Strategy:
        """See :meth:`StrategyBuilder.build`."""
        # Where speeds are known, gradients might go as factors, which are compared with what
        # gradients take that are not encoded.
        built = self.base.build(graph, replace(cluster, speed=None))
        chosen = {name: self._encoded(choice) for name, choice in built.variables.items()}
        return msgspec.structs.replace(built, variables=chosen)

    def _encoded(self, choice: VariableStrategy) -> VariableStrategy:
        one = facts(choice)
        if one.casts and self.rows:
            return msgspec.structs.replace(choice, encoder=self.encoder)
        if not one.encodes:
            return choice
        return msgspec.structs.replace(
            choice,
            encoder=self.encoder,
            encoder_options=self.options,
            hierarchy="flat",
            reduction="auto",
            order=(),
            pieces=1,
        )
