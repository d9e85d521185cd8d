"""Processes of the stages behind the first one, and the pipes to them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from millpond.cluster.stage import StageOptions
from millpond.cluster.stage_model import StageLink, StageLostError

#: Runs a stage: options, its number, links to the stage before and to the one behind for each micro-batch, and the pipe
#: to the first stage's process.
RunStage = Callable[[StageOptions, int, Sequence[Connection], Sequence[Connection], Connection], None]
#: Seconds that a process has to end by itself.
_CLOSE_S = 5.0


class StageProcesses:
    """A process for each stage but the first, which is in this one.

    Each sends None when its stage is open, or a text that says why it is not, and takes None as the last message.

    Args:
        options: Options of all stages.
        run: Runs a stage in its process.

    Attributes:
        links: Links to the second stage, one for each micro-batch.
        processes: The processes, in the order of their stages.
    """

    def __init__(self, options: StageOptions, run: RunStage) -> None:
        context = multiprocessing.get_context("spawn")
        pipes = [[context.Pipe() for _ in range(options.micro_batches)] for _ in range(options.stages - 1)]
        self._controls: list[Connection] = []
        self.processes: list[Any] = []
        self.links = [StageLink(ours, "stage 1") for ours, _ in pipes[0]]
        try:
            for number in range(1, options.stages):
                ours, theirs = context.Pipe()
                before = [end for _, end in pipes[number - 1]]
                behind = [end for end, _ in pipes[number]] if number < options.stages - 1 else []
                process = context.Process(target=run, args=(options, number, before, behind, theirs), daemon=True)
                process.start()
                for end in (theirs, *before, *behind):
                    end.close()  # so that a process that ends is noticed here
                self._controls.append(ours)
                self.processes.append(process)
        except BaseException:
            self.kill()
            raise

    def tell(self, message: object) -> None:
        """Send a message to each process.

        Raises:
            OSError: one has ended.
        """
        for control in self._controls:
            control.send(message)

    def answers(self) -> list[str | None]:
        """Return the next answer of each process.

        Raises:
            EOFError, OSError: one has ended.
        """
        return [control.recv() for control in self._controls]

    def wait(self) -> None:
        """Wait until each process has answered that all is well.

        Raises:
            StageLostError: one says what went wrong.
            EOFError, OSError: one has ended.
        """
        for control in self._controls:
            if (answer := control.recv()) is not None:
                raise StageLostError(answer)

    def reason(self, error: BaseException) -> StageLostError:
        """Return what a process that ended said last, or else what was noticed of it here."""
        for number, control in enumerate(self._controls, 1):
            with suppress(OSError, EOFError):
                while control.poll(0):
                    if (answer := control.recv()) is not None:
                        return StageLostError(f"stage {number}: {answer}")
        return error if isinstance(error, StageLostError) else StageLostError("a stage has ended: begin again")

    def close(self) -> None:
        """End the processes, those that do not end by themselves by force."""
        for link in self.links:
            link.close()
        for control in self._controls:
            with suppress(OSError):
                control.send(None)
        for process in self.processes:
            process.join(_CLOSE_S)
            if process.is_alive():
                process.kill()

    def kill(self) -> None:
        """End the processes by force."""
        for link in self.links:
            link.close()
        for process in self.processes:
            process.kill()
