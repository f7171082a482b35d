"""LAMB over flat buffers: one reduction, state divided over the ranks, no waits of the host."""

from collections.abc import Callable, Mapping
from typing import Any, overload

import torch

from commlib.core.manager import comm
from commlib.errors import ArgumentError
from commlib.ops.agreement import check_ranks_agree, refuse_together
from commlib.ops.arguments import Ring, ring_number
from commlib.ops.lamb.eager import eager
from commlib.ops.lamb.lamb_rings import NAME, LambRings
from commlib.ops.lamb.parameters import check_new_group, check_params, keep_rates
from commlib.ops.lamb.settings import Settings, check_group, facts
from commlib.ops.lamb.sharded_state import ShardedState
from commlib.ops.lamb.state_checks import LOAD

Tensor = torch.Tensor


class DistributedFusedLamb(torch.optim.Optimizer):
    """LAMB for data parallelism: sums the gradients, and divides the state over the ranks.

    The parameters become views of one flat buffer per dtype, and so do their gradients. A step is
    one reduction, a few kernels over each rank's shard and one gather, whatever the number of
    parameters. 16-bit parameters have float32 master weights, which are divided too. The host
    reads nothing, so ``commlib.graph.capture`` captures the step. It runs on the caller's current
    stream.

    A step whose summed gradients are not finite changes nothing; ``skipped`` is True then.
    ``torch.amp.GradScaler`` may call the step, and the scales of the ranks may differ.

    Every rank of the ring creates the optimizer, with the same parameters and settings. The
    parameters of rank 0 are sent to all.

    Example:
        >>> optimizer = ops.DistributedFusedLamb(model.parameters(), lr=1e-3, max_grad_norm=1.0)
        >>> (loss(model, batch) / ring.size).backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """

    # GradScaler hands its scale over and leaves the decision to skip to step().
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        ring_id: Ring = 0,
        *,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        exclude_from_weight_decay: Callable[[Tensor], bool] | None = None,
        max_grad_norm: float = 0.0,
        clip_after_allreduce: bool = True,
        is_grad_scaled_by_nranks: bool = True,
        gradient_accumulation_steps: int = 1,
        use_master_acc_grad: bool = True,
        use_master_param_norm: bool = True,
        shard_ring: Ring | None = None,
        cross_ring: Ring | None = None,
    ) -> None:
        """Make the buffers, compare the settings of the ranks, and send the parameters of rank 0.

        Args:
            params: Parameters of float32 and of one 16-bit dtype, or parameter groups, which may
                have their own ``lr`` and ``weight_decay``.
            ring_id: The ring whose ranks share the data, its id or its name.
            lr: Learning rate; a tensor of one element may change without a new capture.
            betas: Decay of the mean and of the mean square of the gradients.
            eps: Summand of the denominator, above 0.
            weight_decay: Factor of the weights that is added to the direction.
            exclude_from_weight_decay: Returns True for a parameter without weight decay.
            max_grad_norm: Limit of the global norm of the gradients; 0 for none.
            clip_after_allreduce: True limits the norm of the sum. False limits the gradient of
                each rank before the sum, by its own norm, in place.
            is_grad_scaled_by_nranks: True if the loss was divided by the number of ranks; with
                False the sum of the gradients is.
            gradient_accumulation_steps: Calls of ``step`` per update. Their gradients are added.
            use_master_acc_grad: True adds the gradients of 16-bit parameters in float32.
            use_master_param_norm: True takes norms of master weights, False of the parameters.
            shard_ring: The ranks that divide one copy of the state, such as those of one node.
                Default: all ranks.
            cross_ring: The ranks with the same position in their ``shard_ring``. With it the sum
                is a reduce_scatter over ``shard_ring`` and an all_reduce over ``cross_ring``.
                Without it, an all_reduce over all ranks writes the sum to the gradients.

        Raises:
            ArgumentError: A setting is out of range, differs between ranks, or a parameter does
                not require grad. On every rank, before anything is launched.
            DtypeError, DeviceError: A parameter can't be part of the buffers.
            RingError: A ring does not exist here.
        """
        self._microbatches, self._has_buffers = 0, False
        ring = self._ring = comm(ring_number(NAME, ring_id))
        prefix, defaults = ring._describe(NAME), {"lr": lr, "betas": betas, "eps": eps}
        settings = self._settings = Settings(
            0.0 if max_grad_norm is None else max_grad_norm,
            clip_after_allreduce,
            is_grad_scaled_by_nranks,
            gradient_accumulation_steps,
            use_master_acc_grad,
            use_master_param_norm,
        )
        with refuse_together(ring, NAME):
            settings.check(prefix)
            rings = LambRings(ring, shard_ring, cross_ring)
            rings.check()
            self._set_groups(params, {**defaults, "weight_decay": weight_decay})
            with_decay = check_params(ring, self.param_groups, exclude_from_weight_decay)
            agreed = facts(settings, self.param_groups, with_decay, rings.shard.size)
        rows = check_ranks_agree(ring, NAME, agreed, [rings.shard.rank])
        rings.check_positions([row[0] for row in rows])
        with torch.no_grad():
            self._sharded = ShardedState(self.param_groups, with_decay, rings, settings)
        self._has_buffers = True

    def _set_groups(self, params: Any, defaults: dict[str, Any]) -> None:
        """Let torch make the parameter groups, with an error of this project."""
        try:
            super().__init__(params, defaults)
        except (TypeError, ValueError) as error:  # torch's checks of params
            if isinstance(error, ArgumentError):
                raise
            raise ArgumentError(
                f"{self._describe('params')}: {error}; pass model.parameters()"
            ) from error

    # -- steps -------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Add the gradients of this microbatch and, after the last one, update the parameters.

        With more than one microbatch the host counts them. Capture ``accumulate`` and ``update``
        then, instead of this method.

        Args:
            closure: Computes the loss and the gradients first.

        Returns:
            The loss of ``closure``.

        Raises:
            ArgumentError: No parameter has a gradient. Nothing is changed.
            RingError: A ring was closed or has failed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._settings.accumulation_steps > 1:
            self.accumulate()
            self._microbatches += 1
            if self._microbatches < self._settings.accumulation_steps:
                return loss
            self._microbatches = 0
        self.update()
        return loss

    def accumulate(self) -> None:
        """Add the gradients of this microbatch to the sum; nothing is sent.

        Raises:
            ArgumentError: No parameter has a gradient, or each call of ``step`` is an update.
        """
        if self._settings.accumulation_steps == 1:
            raise ArgumentError(
                f"{self._describe('accumulate')}: gradient_accumulation_steps is 1; expected 2 or "
                f"more; pass gradient_accumulation_steps= to the constructor"
            )
        with eager():
            self._sharded.accumulate()

    def update(self) -> None:
        """Update the parameters by the gradients or, with accumulation, by their sum.

        Every rank calls it.

        Raises:
            ArgumentError: No parameter has a gradient, or two groups have other betas or eps.
            RingError: A ring was closed or has failed.
        """
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        with eager():
            self._sharded.update(self.param_groups, scale, found_inf)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Set the gradients to zero by one kernel per dtype.

        Args:
            set_to_none: True drops them instead; the next step then copies the new ones into the
                flat buffers.
        """
        if set_to_none:
            super().zero_grad(set_to_none=True)
            return
        for part in self._sharded.parts:
            part.gradients.zero_()
            part.attach_gradients()

    @torch.no_grad()
    def refresh_master(self) -> None:
        """Set the master weights to the parameters, after the program has changed these.

        Parameters that have left the flat buffer, as by ``p.data = x``, are put back first.

        Raises:
            DtypeError, DeviceError, ShapeError: One does not fit any more.
        """
        self._sharded.settle()
        for part in self._sharded.parts:
            part.refresh_weights()

    @property
    def skipped(self) -> Tensor:
        """[1] bool on the device: True if the last update changed nothing."""
        return self._sharded.skipped

    @property
    def shards(self) -> list[Tensor]:
        """This rank's shards of the moments and of the master weights."""
        return self._sharded.shards

    def _describe(self, method: str) -> str:
        return f"{self._ring._describe(NAME)}: {method}"

    # -- state -------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; only the constructor can.

        Args:
            param_group: Parameters, and their settings.

        Raises:
            ArgumentError: The buffers exist, or a setting of the group is out of range.
        """
        if self._has_buffers:
            raise ArgumentError(
                f"{self._describe('add_param_group')}: the flat buffers hold "
                f"{len(self._sharded.order)} parameters and can't grow; expected all parameters in "
                f"the constructor; create a new optimizer with all of them"
            )
        prefix, number = self._ring._describe(NAME), len(self.param_groups)
        check_new_group(prefix, param_group)
        super().add_param_group(param_group)
        check_group(prefix, number, self.param_groups[number])

    def __getstate__(self) -> dict[str, Any]:
        """Refuse a copy: buffers and rings belong to this process."""
        raise ArgumentError(
            f"{self._describe('copy')}: the optimizer can't be copied or pickled; expected its "
            f"state; call state_dict()"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state in CPU memory, in torch's format, for any number of ranks.

        Every rank of the shard ring calls it. It blocks the host. Save the model too: its values
        are not included, except for the master weights of 16-bit parameters.

        Raises:
            ArgumentError: Some microbatches of an update are missing.
        """
        if self._microbatches:
            raise ArgumentError(
                f"{self._describe('state_dict')}: {self._microbatches} of "
                f"{self._settings.accumulation_steps} microbatches are accumulated; expected none; "
                f"call it after a step that updates"
            )
        return {**super().state_dict(), "state": self._sharded.gathered()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of any number of ranks. Load the model too.

        Every rank of the ring calls it. The hosts compare what they load; no tensor is sent. A
        learning rate in a tensor keeps its memory, for captured steps.

        Args:
            state_dict: A result of ``state_dict``, the same on every rank of the ring.

        Raises:
            ArgumentError: The state is of other parameters or of another optimizer, or the ranks
                load different ones. On every rank, before anything is changed.
        """
        with refuse_together(self._ring, LOAD):
            loaded = self._sharded.check(self.param_groups, state_dict)
        check_ranks_agree(self._ring, LOAD, loaded)
        rates = [group["lr"] for group in self.param_groups]
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        keep_rates(self.param_groups, rates)
        self._sharded.load(state_dict["state"])
        self._microbatches = 0
