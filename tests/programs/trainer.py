"""A program of the Trainer of Transformers: rank 0 prints its losses and the trained weights.

It knows nothing of commlib; Accelerate makes the group. It is started with torchrun.
"""

import gc
import sys
import tempfile

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

SIZES = {
    **{"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
}
STEPS, WORDS = 3, 8


def main() -> None:
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    rows = torch.randint(3, SIZES["vocab_size"], (16, WORDS))
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            use_cpu=True,
            per_device_train_batch_size=2,
            max_steps=STEPS,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        data = [{"input_ids": x, "labels": x} for x in rows]
        trainer = Trainer(model, settings, train_dataset=data)
        trainer.train()
    if dist.get_rank() == 0:
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        weights = [x.double().sum().item() for x in model.parameters()]
        print(f"result {settings.world_size} {losses} {weights}")
        print(f"backend {dist.get_backend()}", file=sys.stderr)
    del trainer, model
    gc.collect()  # DDP goes before its group: its destructor could wait for torch's gloo for ever
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
