"""The calls of a process group that rings can't make; each error says what to call instead."""

from typing import Any, NoReturn

from commlib.core.compiler import untraced_methods


@untraced_methods
class UnsupportedCalls:
    """Methods of torch's groups that raise here; without them torch answers None or fails."""

    supports_shrinking = False

    def recv_anysource(self, tensors: Any, tag: int = 0) -> NoReturn:
        """Raise an error for a receive from any rank."""
        raise NotImplementedError("recv without src: rings receive from one rank; pass src=")

    def merge_remote_group(self, *args: Any, **options: Any) -> NoReturn:
        """Raise an error for a group that joins another one."""
        raise NotImplementedError(
            "merge_remote_group: the members of a ring are fixed; call dist.new_group(ranks) with "
            "the ranks of both groups"
        )

    def shrink(self, *args: Any, **options: Any) -> NoReturn:
        """Raise an error for a group that loses ranks."""
        raise NotImplementedError(
            "shrink_group: the members of a ring are fixed; call dist.new_group(ranks) with the "
            "ranks that stay"
        )

    def _register_on_completion_hook(self, hook: Any) -> NoReturn:
        raise NotImplementedError(
            "_register_on_completion_hook: rings have no thread that watches works; call "
            "work.get_future().then(hook) on the works of async_op=True"
        )

    def _wait_for_pending_works(self) -> NoReturn:
        raise NotImplementedError(
            "_wait_for_pending_works: rings keep no list of works; call wait() on each of them"
        )

    def _enable_collectives_timing(self) -> NoReturn:
        raise NotImplementedError(
            "_enable_collectives_timing: works of rings have no duration; use torch.profiler"
        )
