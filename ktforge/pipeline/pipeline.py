"""A pipeline that can be planned and run."""

from __future__ import annotations

import time
from dataclasses import replace

from ktforge.contract.plan import Plan, Recipe, Summary
from ktforge.contract.registry import Registry
from ktforge.errors import AlreadyDone, OutputError, UnknownExperts
from ktforge.planning.plan import make_plan
from ktforge.readback.packed import check_not_packed
from ktforge.running.execute import execute
from ktforge.verification.verify import check_output


class Pipeline(Recipe):
    __doc__ = Recipe.__doc__

    def plan(self, registry: Registry | None = None) -> Plan:
        """What :meth:`run` will do, and all that speaks against it, from headers and config.json alone.

        ``registry`` brings the stages that others may leave work to, the layouts that a checkpoint may have been packed
        in, and the writers that may have left files in the output folder. Raises CheckpointError if the checkpoint
        cannot be read.
        """
        classes = registry.classes() if registry is not None else ()
        recipe = self.equipped(classes) if registry is not None else self
        try:
            return make_plan(recipe, classes)
        except UnknownExperts:
            check_not_packed(recipe.loader, registry)
            raise

    def run(
        self,
        *,
        overwrite: bool = False,
        restart: bool = False,
        verify: bool = False,
        verify_output: bool = False,
        workers: int | None = None,
        memory_limit: int | None = None,
        registry: Registry | None = None,
    ) -> Summary:
        """Plans and converts; returns what was done.

        An unfinished output of the same pipeline and source goes on where it stopped; ``restart`` discards it,
        ``verify`` compares the hashes of what it holds. ``verify_output`` reads what was written back from the disk and
        compares its hashes before it is published, and then looks at it as :func:`ktforge.verify` does. ``overwrite``
        replaces what is in the output folder, ``workers`` is the number of threads (default: one a core),
        ``memory_limit`` bounds the bytes they work on at once, ``registry`` brings observers, and what :meth:`plan` has
        it for. Raises KtforgeError; then what the output folder held is still there, and the next call goes on.
        """
        began = time.perf_counter()
        plan = self.plan(registry)
        if verify_output:
            if plan.pipeline.writer.folder() is None:
                raise OutputError(f"the writer {plan.pipeline.writer.name} has no folder whose files could be verified")
            plan = replace(plan, rereads=True)
        hook = (registry or Registry()).hook
        try:
            units = execute(
                plan, hook, overwrite=overwrite, restart=restart, verify=verify, workers=workers,
                memory_limit=memory_limit,
            )  # fmt: skip
            if verify_output:
                check_output(plan, workers=workers, registry=registry)
        except AlreadyDone as done:
            if verify_output:
                check_output(replace(plan, rereads=False), workers=workers, registry=registry)
            hook.ktforge_failed(plan=plan, error=done)
            raise
        except BaseException as error:
            hook.ktforge_failed(plan=plan, error=error)
            raise
        summary = Summary(
            plan, time.perf_counter() - began, len(units), sum(u.source.nbytes for u in units), plan.output_bytes,
            plan.pipeline.writer.folder(),
        )  # fmt: skip
        hook.ktforge_finished(plan=plan, summary=summary)
        return summary
