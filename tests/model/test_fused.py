import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.autograd import gradcheck
from train.models import relative, tiny

from honed.model.fused import Product, fuse


def adapted(dtype: torch.dtype = torch.float64, **options: object) -> torch.nn.Module:
    torch.manual_seed(0)
    chosen = {"r": 3, "lora_alpha": 6, "target_modules": "all-linear", "init_lora_weights": False, **options}
    return get_peft_model(tiny(dtype), LoraConfig(**chosen), autocast_adapter_dtype=False)


def run(model: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(input_ids=torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])).logits
    model.zero_grad(set_to_none=True)
    logits.square().sum().backward()
    return logits.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_outputs_and_gradients_are_those_of_peft(dtype: torch.dtype, tolerance: float) -> None:
    model = adapted(dtype)
    logits, gradients = run(model)
    assert fuse(model) == 14  # 7 linears in each of 2 layers
    fused_logits, fused_gradients = run(model)
    assert relative(fused_logits, logits) < tolerance
    assert relative(fused_gradients, gradients) < tolerance


def test_gradients_by_finite_differences() -> None:
    torch.manual_seed(1)
    x, weight, bias = torch.randn(4, 5).double(), torch.randn(6, 5).double(), torch.randn(6).double()
    down, up = torch.randn(2, 5).double(), torch.randn(6, 2).double()
    x.requires_grad_(), down.requires_grad_(), up.requires_grad_()
    assert gradcheck(lambda x, a, b: Product.apply(x, weight, bias, a, b, 0.7), (x, down, up))


def test_a_disabled_adapter_is_the_base_model() -> None:
    model = adapted()
    with model.disable_adapter():
        expected = model(input_ids=torch.tensor([[1, 2]])).logits
    fuse(model)
    with model.disable_adapter():
        assert torch.equal(model(input_ids=torch.tensor([[1, 2]])).logits, expected)


def test_what_it_cannot_do_is_left_alone() -> None:
    assert fuse(adapted(use_dora=True)) == 0
    assert fuse(adapted(lora_dropout=0.5)) == 0
