"""Programs of other libraries, eager and captured; `make models` compares all of them.

The table says what is expected. A program that is refused here and turns out to be equal fails too,
so that the table stays true.
"""

import importlib.util
import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.processes import ROOT, environment, warm_ranks

EQUAL = (
    "transformers/LlamaForCausalLM/eval",
    "transformers/LlamaForCausalLM/train",
    "transformers/LlamaForCausalLM/step",
    "transformers/LlamaForCausalLM/output",
    "transformers/MistralForCausalLM/eval",
    "transformers/Gemma3ForCausalLM/train",
    "transformers/GPT2LMHeadModel/train",
    "transformers/MixtralForCausalLM/eval",
    "transformers/DeepseekV3ForCausalLM/eval",
    "transformers/MambaForCausalLM/eval",
    "transformers/BertForMaskedLM/eval",
    "transformers/BertForMaskedLM/train",
    "transformers/DebertaV2ForMaskedLM/train",
    "transformers/T5ForConditionalGeneration/eval",
    "transformers/T5ForConditionalGeneration/train",
    "transformers/BartForConditionalGeneration/train",
    "transformers/WhisperForConditionalGeneration/train",
    "transformers/ViTForImageClassification/train",
    "transformers/SwinForImageClassification/eval",
    "transformers/ResNetForImageClassification/train",
    "transformers/CLIPModel/train",
    "transformers/Wav2Vec2ForCTC/eval",
    "transformers/PatchTSTForPrediction/train",
    "generation/LlamaForCausalLM/decode step",
    "generation/LlamaForCausalLM/sampled decode step",
    "optimizers/SGD momentum/update alone",
    "optimizers/SGD momentum/whole step",
    "optimizers/AdamW fused/update alone",
    "schedulers/ReduceLROnPlateau/forward",
    "schedulers/cosine of transformers/backward",
    "mixed precision/model alone",
    "loops/gradient accumulation",
    "loops/LSTM",
    "loops/train and evaluate",
    "nanoGPT/model",
    "accelerate/model, mixed precision bf16",
    "schedulefree/AdamWScheduleFree/loss",
    "diffusers/UNet2DModel/eval",
    "diffusers/AutoencoderKL/train",
    "two ranks/Llama TP=2/eval",
    "two ranks/Llama TP=2/decode step",
)
TIMM = (  # timm needs torchvision, whose wheels fit only a torch that was built for CUDA
    "timm/test_vit/eval",
    "timm/test_vit/train",
    "timm/test_resnet/eval",
    "timm/test_convnext/train",
)
REFUSED_ON_A_GPU = {"transformers/DebertaV2ForMaskedLM/train": "in a backward"}
REFUSED = {  # words of the reason
    "transformers/JetMoeForCausalLM/eval": "tolist",
    "transformers/XmodForMaskedLM/eval": "index by a mask",
    "transformers/FSMTForConditionalGeneration/train": "item",
    "transformers/Wav2Vec2ForCTC/train": "item",
    "transformers/ReformerForMaskedLM/train": "the function sets a generator",
    "generation/MistralForCausalLM/decode step": "cumulative_length_int in each run",
    "optimizers/AdamW/update alone": "item",
    "optimizers/LBFGS/whole step": "item",
    "penalties/captured critic": "second derivatives",
    "mixed precision/float16 GradScaler": "keep the GradScaler outside the function",
    "loops/mixup NumPy": "draws from Python's or NumPy's generator",
    "loops/momentum contrast": "item 0 of a list in each run",
    "schedulefree/AdamWScheduleFree/whole turn": "item 'k' of a dict in each run",
    "diffusers/DDIMScheduler/whole step": "item",
    "diffusers/PNDMScheduler/denoiser alone": "was overwritten",
}
NOT_REPLAYED = (  # equal, but every call was made eagerly or captured again
    "generation/LlamaForCausalLM/beam step",
    "mixed precision/GradScaler, the error is caught",
    "mixed precision/GradScaler, eager where it fails",
    "schedulers/OneCycleLR/float",
)


class Comparisons:
    """A process that has loaded the libraries, and compares one program after the other."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._process: subprocess.Popen[str] | None = None

    def __call__(self, name: str) -> dict[str, Any]:
        """Return the outcome of a program."""
        if self._process is None:
            warm = warm_ranks()
            self._process = subprocess.Popen(
                [warm["PYTHON_EXEC"], "-m", "tests.models", "serve", "--device", self._device],
                cwd=ROOT,
                env={**environment(), **warm},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(name, file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, f"the process that compares ended with {self._process.wait(20)}"
        outcome: dict[str, Any] = json.loads(line)
        return outcome

    def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.communicate(timeout=60)  # the end of its input is its end


@pytest.fixture(scope="module")
def compared() -> Iterator[Comparisons]:
    """Give ``compared(name)``, the outcome of a program."""
    comparisons = Comparisons("cpu")
    yield comparisons
    comparisons.stop()


@pytest.fixture(scope="module")
def compared_on_gpu() -> Iterator[Comparisons]:
    """Give the same on a GPU; tests that use it are not collected where there are none."""
    comparisons = Comparisons("cuda")
    yield comparisons
    comparisons.stop()


@pytest.mark.parametrize("name", EQUAL)
def test_equal(compared: Comparisons, name: str) -> None:
    outcome = compared(name)
    assert outcome["kind"] == "equal", outcome["text"]
    assert outcome["replays"] > 0


@pytest.mark.parametrize("name", REFUSED)
def test_refused(compared: Comparisons, name: str) -> None:
    outcome = compared(name)
    assert outcome["kind"] == "refused", "now equal: move it to EQUAL"
    assert REFUSED[name] in outcome["text"]


@pytest.mark.parametrize("name", NOT_REPLAYED)
def test_not_replayed(compared: Comparisons, name: str) -> None:
    assert compared(name)["kind"] == "idle", "now replayed: move it to EQUAL"


def _runs_here(name: str) -> bool:
    """Return True if the library of a family of programs is installed: a GPU may lack some."""
    family = name.partition("/")[0]
    optional = family in ("accelerate", "diffusers", "schedulefree", "timm")
    return not optional or importlib.util.find_spec(family) is not None


ON_A_GPU = [x for x in (*EQUAL, *TIMM) if x not in REFUSED_ON_A_GPU and _runs_here(x)]


@pytest.mark.gpu
@pytest.mark.parametrize("name", REFUSED_ON_A_GPU)
def test_refused_on_a_gpu(compared_on_gpu: Comparisons, name: str) -> None:
    outcome = compared_on_gpu(name)
    assert outcome["kind"] == "refused", "now equal: take it out"
    assert REFUSED_ON_A_GPU[name] in outcome["text"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_A_GPU)
def test_equal_on_a_gpu(compared_on_gpu: Comparisons, name: str) -> None:
    outcome = compared_on_gpu(name)
    assert outcome["kind"] == "equal", outcome["text"]
