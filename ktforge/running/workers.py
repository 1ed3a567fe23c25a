"""One pool of threads for a run: they take shares in order, and parts of one another's where none is left."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

from ktforge.errors import PlanError
from ktforge.planning.shares import Share
from ktforge.running.buffers import Buffers
from ktforge.text import counted

logger = logging.getLogger(__name__)

Task = Callable[[], None]


class _Parts:
    """What a share was cut into: ``tasks`` that nobody has begun, and how many of all are not done."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self.tasks = deque(tasks)
        self.left = len(self.tasks)
        self.error: BaseException | None = None


class Workers:
    """``count`` threads for the shares of a run; ``memory_limit`` bounds the bytes of those in flight.

    ``buffers`` are for what the calling thread packs; with a limit, they are given back before another share may count
    on their memory.
    """

    def __init__(self, count: int, memory_limit: int | None = None) -> None:
        self._count, self._limit = count, memory_limit
        self.buffers = Buffers()
        self._changed = threading.Condition()  # of all that follows
        self._waiting: deque[Share] = deque()
        self._in_flight = 0
        self._active = 0
        self._offered: list[_Parts] = []
        self._stopped = False

    def run(self, shares: Sequence[Share], work: Callable[[Share], None]) -> None:
        """Calls ``work`` on all shares; the first exception stops the others at their next share."""
        self._waiting.extend(ordered(shares, self._count))
        pool = ThreadPoolExecutor(self._count, thread_name_prefix="ktforge")
        try:
            futures = self._begin(pool, work)
            for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                future.result()
        finally:
            self._join(pool)

    def _begin(self, pool: ThreadPoolExecutor, work: Callable[[Share], None]) -> list[Future[None]]:
        """Fewer threads than asked for do, where the system allows no more."""
        futures = []
        try:
            for _ in range(self._count):
                futures.append(pool.submit(self._loop, work))
        except RuntimeError as error:
            if not futures:
                raise PlanError(
                    "no thread can be started: the system allows this user or container no more of them (ulimit -u), "
                    "or no memory for one"
                ) from error
            logger.warning("%s are started, for the system allows no more", counted(len(futures), "worker"))
        return futures

    @property
    def scarce(self) -> bool:
        """Whether so few shares are left that threads would stand idle before long."""
        return len(self._waiting) < self._count - 1

    def together(self, tasks: Sequence[Task]) -> None:
        """Calls all ``tasks`` of one share, with the help of threads that find no share. Raises what one of them did;
        those that have not begun by then are dropped."""
        parts = _Parts(tasks)
        with self._changed:
            self._offered.append(parts)
            self._changed.notify_all()
        while self._do(parts):
            pass
        with self._changed:
            self._offered.remove(parts)
            self._changed.wait_for(lambda: parts.left == 0)
        if parts.error is not None:
            raise parts.error

    def _loop(self, work: Callable[[Share], None]) -> None:
        try:
            while (found := self._next()) is not None:
                if isinstance(found, Share):
                    try:
                        work(found)
                    finally:
                        self._give_back()
                        self._done(found)
                else:
                    self._do(found)
        except BaseException:
            self._stop()
            raise

    def _next(self) -> Share | _Parts | None:
        """Waits for a share, or for parts of one that another thread works on; None if there will be no more."""
        with self._changed:
            while not self._stopped:
                for parts in self._offered:
                    if parts.tasks:
                        return parts
                if self._waiting and self._fits(self._waiting[0]):
                    share = self._waiting.popleft()
                    self._in_flight += share.unit.working_bytes
                    self._active += 1
                    return share
                if not self._waiting and not self._active:
                    break
                self._changed.wait()
        return None

    def _fits(self, share: Share) -> bool:
        return self._limit is None or self._in_flight + share.unit.working_bytes <= self._limit

    def _done(self, share: Share) -> None:
        with self._changed:
            self._in_flight -= share.unit.working_bytes
            self._active -= 1
            self._changed.notify_all()

    def _do(self, parts: _Parts) -> bool:
        """Calls one of the tasks; False if all have been begun."""
        with self._changed:
            if not parts.tasks:
                return False
            task = parts.tasks.popleft()
        error = None
        try:
            task()
        except BaseException as caught:
            error = caught
        del task  # it holds the share's arrays, which are taken for gone once no part is left
        self._give_back()
        with self._changed:
            parts.left -= 1
            if error is not None:
                parts.error = parts.error or error
                parts.left -= len(parts.tasks)
                parts.tasks.clear()
            if parts.left == 0:
                self._changed.notify_all()
        return True

    def _give_back(self) -> None:
        if self._limit is not None:
            self.buffers.clear()

    def _stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _join(self, pool: ThreadPoolExecutor) -> None:
        """Lets no more shares begin and waits for those in flight, however often it is interrupted: no thread may
        outlive the sink it writes to."""
        interrupt = None
        while True:
            try:
                self._stop()
                pool.shutdown()
                break
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt


def ordered(shares: Sequence[Share], workers: int) -> list[Share]:
    """The order in which ``shares`` are taken: that of the files, which reading ahead needs, but a share comes first if
    it would still be worked on when the others, spread over the threads, have been done for longer than one takes."""
    sizes = [share.planned.source.nbytes for share in shares]
    left = total = sum(sizes)
    squares = sum(size * size for size in sizes)
    late: list[Share] = []
    others: list[Share] = []
    for share, size in zip(shares, sizes, strict=True):
        usual = (squares - size * size) / max(1, total - size)  # the size of the share that another byte is in
        (late if size > left / workers + usual else others).append(share)
        left -= size
    return [*sorted(late, key=lambda s: -s.planned.source.nbytes), *others]
