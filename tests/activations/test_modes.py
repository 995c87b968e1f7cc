"""Other modes of autograd, and what is refused: each gives what PyTorch gives, or an error that says what to do."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call

import narrowband as nb
from narrowband.errors import UnsupportedError
from tests.activations.models import SMALL, same

#: What forward-mode derivatives import of PyTorch.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")


def compress(model, **options):
    return nb.compress_activations(model, **{"min_numel": SMALL, **options})


class Scores(nn.Module):
    """Attention written out, and normalization of two kinds."""

    num_heads = 4

    def __init__(self):
        super().__init__()
        self.qkv, self.norm, self.rms, self.out = nn.Linear(32, 96), nn.LayerNorm(32), nn.RMSNorm(32), nn.Linear(32, 8)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).view(4, 8, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        y = ((q @ k.transpose(-1, -2)) * 0.3).softmax(-1) @ v
        return self.out(F.relu(F.gelu(self.rms(y.transpose(1, 2).reshape(4, 8, 32)))))


def built(seed=0):
    torch.manual_seed(seed)
    model = Scores()
    return model, torch.randn(4, 8, 32)


def error(found, expected):
    a, b = (torch.cat([x.detach().double().flatten() for x in those]) for those in (found, expected))
    return ((a - b).norm() / b.norm()).item()


# ---- PyTorch's fast paths --------------------------------------------------------------------------------------------


class Frozen(nn.Module):
    """A frozen encoder before a layer that is trained."""

    def __init__(self):
        super().__init__()
        self.encoder, self.head = encoder().requires_grad_(False).eval(), nn.Linear(32, 32)

    def forward(self, x):
        return self.head(self.encoder(x))


class SelfAttention(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x, need_weights=False)[0]


def layer():
    return nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)


def encoder():
    return nn.TransformerEncoder(layer(), 2)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize(
    "make",
    [layer, encoder, lambda: nn.Sequential(layer(), nn.Linear(32, 32)), lambda: SelfAttention(32, 4, batch_first=True)],
)
def test_evaluation_without_gradients_takes_the_same_fast_paths_and_training_in_the_same_pass_does_not(make, mode):
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(4, 32, 32)
    hooks = dict(model._forward_pre_hooks)
    with mode():
        if mode is torch.enable_grad:
            model.requires_grad_(False)
        expected = model(x)
        model.requires_grad_()
        trained = model.train()(x)
    for _ in range(2):
        with compress(model) as saved:
            with mode():
                model.eval().requires_grad_(mode is not torch.enable_grad)
                assert torch.equal(model(x), expected)
                assert not saved.raw_bytes
                with pytest.raises(RuntimeError):
                    model(x[..., :5])
            y = model.train().requires_grad_()(x)
        y.sum().backward()
        assert saved.ratio > 2
        assert (y.shape, model._forward_pre_hooks) == (trained.shape, hooks)
        assert not torch.overrides._get_current_function_mode_stack()


def test_a_frozen_encoder_inside_of_a_model_has_the_same_bits():
    torch.manual_seed(0)
    model, x = Frozen(), torch.randn(4, 32, 32)
    expected = model(x)
    with compress(model) as saved:
        y = model(x)
    assert torch.equal(y, expected)
    assert saved.ratio > 2


# ---- inference mode --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_a_forward_without_gradients_inside_of_the_context_is_that_without_it(mode):
    model, x = built()
    with mode():
        expected = model(x)
    with compress(model) as saved, mode():
        found = model(x)
    assert same(found, expected)
    assert (saved.raw_bytes, saved.outliers) == (0, 0)


class Distilled(nn.Module):
    """A student, and a frozen teacher that runs in inference mode inside of forward."""

    def __init__(self):
        super().__init__()
        self.teacher, self.student = Scores().requires_grad_(False), Scores()

    def forward(self, x):
        with torch.inference_mode():
            wanted = self.teacher(x)
        found = self.student(x)
        return (found - wanted.clone()).square().mean() + (found + wanted).mean()  # a sum saves neither


def test_a_teacher_in_inference_mode_inside_of_forward_changes_nothing_of_what_the_student_learns():
    torch.manual_seed(0)
    model, x = Distilled(), torch.randn(4, 8, 32)
    expected = model(x)
    wanted = torch.autograd.grad(expected, model.student.parameters())
    handle = compress(model)
    for _ in range(2):
        with handle as saved:
            loss = model(x)
        assert same(loss, expected)
        assert error(torch.autograd.grad(loss, model.student.parameters()), wanted) < 0.02
        assert all(name.startswith("student") for name in saved.by_module if name)


def test_saving_an_inference_tensor_is_the_error_that_it_is_without_compression():
    model, _ = built()
    with torch.inference_mode():
        x = torch.randn(4, 8, 32)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        model(x)
    with compress(model), pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        model(x)


# ---- forward-mode derivatives ----------------------------------------------------------------------------------------


def by_jvp(model, x):
    return torch.func.jvp(model, (x,), (torch.cos(x),))


def by_jacfwd(model, x):
    return (torch.func.jacfwd(lambda t: model(x * t).mean((0, 1)))(torch.tensor([1.1])),)


def by_dual_numbers(model, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.cos(x))))


@pytest.mark.parametrize("how", [by_jvp, by_jacfwd, by_dual_numbers])
def test_forward_mode_derivatives_are_exact(how):
    model, x = built()
    expected = how(model, x)
    with compress(model, bits=2):
        found = how(model, x)
    assert all(map(same, found, expected))


def test_forward_over_reverse_gives_the_exact_hessian_vector_product():
    """What backward needs comes back with its tangent."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)), None
    x = torch.randn(16, 16)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def product(context):
        with forward_ad.dual_level():
            dual = {
                name: forward_ad.make_dual(p.clone().requires_grad_(), torch.cos(p)) for name, p in parameters.items()
            }
            with context:
                loss = functional_call(model, dual, (x,)).square().mean()
            gradients = torch.autograd.grad(loss, list(dual.values()))
            return [forward_ad.unpack_dual(gradient).tangent for gradient in gradients]

    assert all(map(same, product(compress(model, bits=2)), product(torch.enable_grad())))


# ---- differentiating twice -------------------------------------------------------------------------------------------

TWICE = {
    "relu": lambda: [nn.ReLU()],
    "relu in place": lambda: [nn.Identity(), nn.ReLU(inplace=True)],
    "dropout": lambda: [nn.Dropout(0.3)],
    "gelu, dropout": lambda: [nn.GELU(), nn.Dropout(0.3)],
    "max pool": lambda: [nn.Unflatten(1, (2, 4, 4)), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 32)],
}


def penalty(model, x, parameters):
    """The gradient of a loss with a gradient penalty: the way with ``torch.autograd.grad`` and inputs named."""
    x = x.clone().requires_grad_()
    loss = model(x).pow(3).mean()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return torch.autograd.grad(loss + 100 * gradient.square().sum(), parameters, materialize_grads=True)


def product_of_hessian(model, x, parameters):
    loss = model(x).pow(3).mean()
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    return torch.autograd.grad(
        sum((g * torch.cos(g.detach())).sum() for g in gradients), parameters, materialize_grads=True
    )


def three_times(model, x, parameters):
    x = x.clone().requires_grad_()
    y = model(x).pow(4).mean()
    for _ in range(2):
        (y,) = torch.autograd.grad(y, x, create_graph=True)
        y = y.pow(2).sum() * 1e3
    return torch.autograd.grad(y, parameters, materialize_grads=True)


@pytest.mark.parametrize("how", [penalty, product_of_hessian, three_times])
@pytest.mark.parametrize("name", TWICE)
def test_differentiating_twice_is_exact_where_masks_and_places_are_kept(name, how):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 32), *TWICE[name](), nn.Linear(32, 4)), torch.randn(16, 32)
    parameters = list(model.parameters())
    torch.manual_seed(1)
    expected = how(model, x, parameters)
    torch.manual_seed(1)
    operators = {"matmul": "off", "gelu": "off", "other": "off"}  # of which nothing is left but what is exact
    with compress(model, operators=operators) as saved:
        found = how(model, x, parameters)
    assert error(found, expected) < 1e-6
    kept = saved.by_operator[{"relu in place": "relu", "gelu, dropout": "dropout"}.get(name, name.replace(" ", "_"))]
    assert kept.kept_bytes < kept.raw_bytes
    torch.manual_seed(1)
    with compress(model):
        found = how(model, x, parameters)
    assert error(found, expected) < 0.1


@pytest.mark.parametrize("vectorize", ["autograd", "vmap"])
@pytest.mark.parametrize("name", TWICE)
def test_a_batch_of_gradients_at_once_is_those_one_by_one(name, vectorize):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 32), *TWICE[name](), nn.Linear(32, 4)), torch.randn(16, 32)
    with compress(model):
        y = model(x).mean(0)
    weight = model[0].weight
    one_by_one = torch.stack([torch.autograd.grad(each, weight, retain_graph=True)[0] for each in y])
    if vectorize == "autograd":
        (found,) = torch.autograd.grad(y, weight, torch.eye(4), is_grads_batched=True, retain_graph=True)
    else:
        found = torch.func.vmap(lambda v: torch.autograd.grad(y, weight, v, retain_graph=True)[0])(torch.eye(4))
    assert error([found], [one_by_one]) < 1e-5


def test_a_vmapped_forward_is_the_same_and_its_gradient_close():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 4)), torch.randn(32, 16)
    expected = model(x)
    with compress(model):
        found = torch.func.vmap(model)(x)
    torch.testing.assert_close(found, expected)
    wanted = torch.autograd.grad(expected.square().mean(), model.parameters())
    assert error(torch.autograd.grad(found.square().mean(), model.parameters()), wanted) < 0.05


# ---- what cannot be --------------------------------------------------------------------------------------------------

CANNOT = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).mean())(x),
    "vjp": torch.func.vjp,
    "jacrev": lambda f, x: torch.func.jacrev(lambda x: f(x).mean((0, 1)))(x),
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).mean())(x),
}


@pytest.mark.parametrize("name", CANNOT)
@pytest.mark.parametrize("inside", [False, True], ids=["around the context", "in the context"])
def test_what_pytorch_lets_no_hooks_into_is_refused_with_what_to_do(name, inside):
    model, x = built()
    handle = compress(model)
    said = pytest.raises(UnsupportedError, match=r"torch\.func\.grad, vjp.*Use torch\.autograd\.grad, or call")
    if inside:
        with said, handle:
            CANNOT[name](model, x)
    else:
        with said:
            CANNOT[name](handle(model.__call__), x)
    with handle as saved:  # and is over then
        model(x).mean().backward()
    assert saved.ratio > 1


def test_other_errors_of_a_model_come_through_as_they_are():
    model, _ = built()
    shapes = pytest.raises(RuntimeError, match="Given normalized_shape")
    with shapes as told, compress(model):
        model(torch.randn(3, 5))
    assert not isinstance(told.value, UnsupportedError)
    with compress(model) as saved:
        model(torch.randn(4, 8, 32))
    assert saved.ratio > 1


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (42, r"expects a torch\.nn\.Module as the model, got 42 \(int\)"),
        (None, r"got None \(NoneType\)"),
        (nn.Linear, r"got the class Linear: pass an instance, such as Linear\(…\)"),
        (F.relu, r"For a function, pass the module that the function calls"),
        ([nn.Linear(2, 2)], r"as the model, got .* \(list\)"),
        (torch.zeros(2), r"tensor\(\[0., 0.\]\) \(Tensor\)"),
    ],
    ids=["number", "nothing", "class", "function", "list", "tensor"],
)
def test_what_is_no_model_is_refused(model, said):
    with pytest.raises(TypeError, match=said):
        nb.compress_activations(model)


@pytest.mark.parametrize("bits", [3, 0, -8, 16, 8.0, "8", True, "none", (8, 4)])
def test_bits_that_are_none_are_refused(bits):
    with pytest.raises(ValueError, match='must be 8, 4, 2 or "off"'):
        nb.compress_activations(nn.Linear(2, 2), bits)


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"bit": 8}, TypeError, "no argument 'bit'; did you mean bits?"),
        ({"nonsense": 8}, TypeError, "Valid names: bits, operators"),
        ({"policy": "policy.toml"}, TypeError, r"policy must be an nb\.ActivationPolicy, got 'policy\.toml' \(str\)"),
        ({"policy": {"bits": 4}}, TypeError, "ActivationPolicy.from_dict makes one from a dictionary"),
        ({"policy": 4}, TypeError, r"policy must be an nb\.ActivationPolicy, got 4 \(int\)"),
        ({"operators": ["softmax"]}, ValueError, "must be a dictionary of bits by name"),
        ({"decay": "0.9"}, ValueError, "decay='0.9' must be at least 0 and below 1"),
        ({"modules": {"0.weights": 8}}, ValueError, r"'0\.weights' matches no module of the model"),
        (
            {"bits": 8, "policy": nb.ActivationPolicy(), "min_numel": 3},
            TypeError,
            "bits, min_numel cannot be given",
        ),
    ],
    ids=str,
)
def test_options_that_cannot_be_are_refused(options, kind, said):
    with pytest.raises(kind, match=said):
        nb.compress_activations(nn.Sequential(nn.Linear(2, 2)), **options)


# ---- states ----------------------------------------------------------------------------------------------------------


def learned():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise((16, 32, 32, 8))))
    handle = compress(model)
    with handle:
        model(torch.randn(16, 16))
    return handle


GOOD = torch.ones(2, 8)
STATES = {
    "list": ([1, 2], r"expected a state with estimates, seed and draws, got \[1, 2\] \(list\)"),
    "nothing": ({}, "got an empty one"),
    "lacks": ({"estimates": {}}, "got 'estimates'$"),
    "more": ({"estimates": {}, "seed": 0, "draws": 0, "step": 1}, "'estimates', 'seed', 'draws', 'step'"),
    "seed": (
        {"estimates": {}, "seed": "x", "draws": 0},
        r"seed in the state must be a whole .*'x' \(str\)",
    ),
    "draws": ({"estimates": {}, "seed": 0, "draws": -1}, "draws in the state must be a whole number"),
    "float": ({"estimates": {}, "seed": 0, "draws": 2.0}, "draws in the state must be a whole number"),
    "estimates": ({"estimates": [GOOD], "seed": 0, "draws": 0}, "estimates in the state must be ranges by name"),
    "module": (
        {"estimates": {"1:matmul:0": GOOD, "blocks.7.mlp:matmul:0": GOOD}, "seed": 0, "draws": 0},
        r"is of another model: it has a range for 'blocks\.7\.mlp:matmul:0' \(module:operator:place\).*'0', '1'",
    ),
    "modules": (
        {"estimates": {"7:matmul:0": GOOD, "8:matmul:0": GOOD}, "seed": 0, "draws": 0},
        "'7:matmul:0' and 1 more",
    ),
    "operator": ({"estimates": {"1:matmuls:0": GOOD}, "seed": 0, "draws": 0}, "of another model"),
    "weights": ({"estimates": {"0.weight": GOOD}, "seed": 0, "draws": 0}, "of another model"),
    "shape": (
        {"estimates": {"1:matmul:0": torch.ones(3, 8)}, "seed": 0, "draws": 0},
        r"float tensor of shape \(2, groups\)",
    ),
    "dtype": ({"estimates": {"1:matmul:0": GOOD.long()}, "seed": 0, "draws": 0}, "got .* of torch.int64"),
    "number": ({"estimates": {"1:matmul:0": 3.0}, "seed": 0, "draws": 0}, "expected a tensor of shape"),
    "nan": ({"estimates": {"1:matmul:0": GOOD * math.nan}, "seed": 0, "draws": 0}, "finite, and widths at least 0"),
    "negative": ({"estimates": {"1:matmul:0": -GOOD}, "seed": 0, "draws": 0}, "finite, and widths at least 0"),
}


@pytest.mark.parametrize("name", STATES)
def test_what_is_no_state_of_the_model_is_refused_before_anything_has_changed(name):
    handle = learned()
    before = handle.state_dict()
    state, said = STATES[name]
    with pytest.raises(ValueError, match=said):
        handle.load_state_dict(state)
    after = handle.state_dict()
    assert (after["seed"], after["draws"], [*after["estimates"]]) == (
        before["seed"], before["draws"], [*before["estimates"]],
    )  # fmt: skip
    assert all(map(torch.equal, after["estimates"].values(), before["estimates"].values()))


def test_its_own_state_is_taken():
    handle, other = learned(), learned()
    with other:
        other.model(torch.randn(16, 16) * 3)
    assert other.state_dict()["draws"] != handle.state_dict()["draws"]
    handle.load_state_dict(other.state_dict())
    assert handle.state_dict()["draws"] == other.state_dict()["draws"]
    for name, value in other.state_dict()["estimates"].items():
        assert torch.equal(handle.state_dict()["estimates"][name], value)
