"""A pipeline that can be planned and run."""

from __future__ import annotations

from ktforge.contract.plan import Plan, Recipe
from ktforge.contract.registry import Registry
from ktforge.errors import UnknownExperts
from ktforge.planning.plan import make_plan
from ktforge.readback.packed import check_not_packed
from ktforge.running.execute import execute


class Pipeline(Recipe):
    __doc__ = Recipe.__doc__

    def plan(self, registry: Registry | None = None) -> Plan:
        """What :meth:`run` will do, and all that speaks against it, from headers and config.json alone.

        ``registry`` brings the layouts that a checkpoint may have been packed in, so that it is called by its name.
        Raises CheckpointError if the checkpoint cannot be read.
        """
        try:
            return make_plan(self)
        except UnknownExperts:
            check_not_packed(self.loader, registry)
            raise

    def run(
        self,
        *,
        overwrite: bool = False,
        restart: bool = False,
        verify: bool = False,
        workers: int | None = None,
        memory_limit: int | None = None,
        registry: Registry | None = None,
    ) -> Plan:
        """Plans and converts; returns the plan that was carried out.

        An unfinished output of the same pipeline and source goes on where it stopped; ``restart`` discards it,
        ``verify`` compares the hashes of what it holds. ``overwrite`` replaces what is in the output folder,
        ``workers`` is the number of threads (default: one a core), ``memory_limit`` bounds the bytes they work on at
        once, ``registry`` brings observers, and what :meth:`plan` has it for. Raises KtforgeError; then what the output
        folder held is still there, and the next call goes on.
        """
        plan = self.plan(registry)
        hook = (registry or Registry()).hook
        execute(
            plan, hook, overwrite=overwrite, restart=restart, verify=verify, workers=workers, memory_limit=memory_limit
        )
        return plan
