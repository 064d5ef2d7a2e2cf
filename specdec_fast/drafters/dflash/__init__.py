"""The ``"dflash"`` drafter: one forward drafts a whole block; DSpark is its extension."""
