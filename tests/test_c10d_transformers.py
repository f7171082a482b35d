"""Programs of Transformers on the backend "commlib": the same bits as with torch's own backends."""

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.support.checks import assert_equal
from tests.support.runs_on import runs_on
from tests.support.torch_groups import assert_same_as_stock, whole

WORDS = 8
STEPS = 3


def shared_folder() -> str:
    folder: Any = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, 0)
    return str(folder[0])


def tensor_parallel(device: torch.device) -> Any:
    """Load with ``tp_plan="auto"``, score, generate and train."""
    from examples import transformers_tp  # a second to import, for the ranks alone

    folder = shared_folder()
    transformers_tp.save(folder)  # rank 0 writes
    dist.barrier()
    model = transformers_tp.load(folder)
    assert_equal(model.device.type, device.type, "device of the model")
    split = [name for name, p in model.named_parameters() if isinstance(p, DTensor)]
    assert_equal(len([name for name in split if "proj" in name]), 2 * 7, "split linear layers")
    results = transformers_tp.results(model, STEPS)
    grads = whole([parameter.grad for parameter in model.parameters()])
    return results, grads, whole(model.parameters())


def trained(device: torch.device) -> Any:
    """Train data-parallel with the Trainer, which takes the group that is there."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from examples import transformers_tp

    model = LlamaForCausalLM(LlamaConfig(**transformers_tp.SIZES))
    rows = torch.randint(3, transformers_tp.VOCABULARY, (16, WORDS))
    settings = TrainingArguments(
        tempfile.mkdtemp(),
        use_cpu=device.type == "cpu",
        per_device_train_batch_size=2,
        max_steps=STEPS,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model, settings, train_dataset=[{"input_ids": x, "labels": x} for x in rows])
    trainer.train()
    assert_equal(settings.world_size, dist.get_world_size(), "ranks of the Trainer")
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert_equal(len(losses), STEPS, "steps")
    return losses, list(model.parameters())


@runs_on("ranks", deadline=120)
def test_programs(ring: Any) -> None:
    for program in (tensor_parallel, trained):
        assert_same_as_stock(ring, program)
