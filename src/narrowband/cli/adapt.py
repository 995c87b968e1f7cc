"""``narrowband adapt``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from narrowband.cli.exits import DONE, check_output
from narrowband.cli.records import written_first
from narrowband.units import counted

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from narrowband.adapt import Plan, Policy

__all__ = ["Adapt", "rows_of"]

Name = Literal["lgreco", "constant", "kmeans", "accordion", "lgreco+accordion", "global-topk", "threshold"]

#: Options of some policies → these.
_FOR: dict[str, tuple[Name, ...]] = {
    "reference": ("lgreco", "constant", "kmeans"),
    "choices": ("lgreco", "kmeans", "lgreco+accordion"),
    **dict.fromkeys(("alpha", "metric", "discretization"), ("lgreco", "lgreco+accordion")),
    **dict.fromkeys(("low", "high", "eta", "before"), ("accordion", "lgreco+accordion")),
    "clusters": ("kmeans",),
    "density": ("global-topk",),
    "value": ("threshold",),
}


@dataclass(frozen=True)
class Adapt:
    """Choose the compression of every layer from recorded gradients, and save the plan.

    Gradients are a file that ``torch.save({name: p.grad for name, p in model.named_parameters()}, file)`` wrote, best
    with the sum of some dozen steps' gradients. ``nb.compress_gradients(model, nb.Plan.load(plan))`` then follows the
    plan; to plan anew while training runs, give it a policy instead: ``nb.LGreCo("powersgd:rank=4")``.

    Examples:
      narrowband adapt gradients.pt --reference powersgd:rank=4 --output plan.json
      narrowband adapt gradients.pt --reference qsgd:bits=4 --alpha 1.2 --plot plan.png --json plan-rows.json
      narrowband adapt gradients.pt --reference topk:density=0.01+ef --choices powersgd:rank=2 none
      narrowband adapt gradients.pt --policy accordion --low powersgd:rank=4 --high powersgd:rank=1 --before earlier.pt
    """

    gradients: Annotated[Path, tyro.conf.Positional]
    """File with the gradients."""
    policy: Name = "lgreco"
    """What decides. lgreco: fewest bytes at the error of the reference; constant: the reference for all; kmeans: CGX's
    clusters of layers; accordion: the low spec where norms changed since the gradients of --before, the high one
    elsewhere; lgreco+accordion: fewest bytes at accordion's error; global-topk: the largest of the whole model;
    threshold: whatever is at least --value."""
    reference: str = "powersgd:rank=4"
    """Spec that is known to be safe for all layers."""
    choices: tuple[str, ...] = ()
    """Specs a layer may get; left out: those around the reference that the L-GreCo paper searches."""
    alpha: float = 1.0
    """How much error the plan may make, as a multiple of the reference's."""
    metric: Literal["l2", "l2_squared"] = "l2"
    """How errors of layers are added up: as norms, or as squares of norms."""
    discretization: int = 10_000
    """How many steps the allowed error is cut into. More are finer, and slower."""
    low: str = "powersgd:rank=4"
    """Accordion's spec where gradients change fast."""
    high: str = "powersgd:rank=1"
    """Accordion's spec elsewhere."""
    eta: float = 0.5
    """Accordion's share of change from which gradients change fast."""
    before: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """For accordion: the file with gradients of an earlier window."""
    clusters: int = 6
    """For kmeans: how many groups of layers it makes."""
    density: float = 0.01
    """For global-topk: the share of all elements that is kept."""
    value: float = 1e-3
    """For threshold: the least magnitude that is kept."""
    ranks: int = 4
    """How many ranks will train: what is gathered, as top-k is, costs more the more there are."""
    min_numel: int = 1024
    """Smaller tensors, and vectors, are no layers."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the plan to this file. After Ctrl-C nothing is there, because all layers are decided together."""
    plot: Annotated[Path | None, tyro.conf.arg(metavar="FILE.png")] = None
    """Draw how many times less each layer sends."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the table to this file, with machine, versions and command."""

    def __call__(self, console: Console) -> int:
        from narrowband.adapt import Traffic
        from narrowband.report.plots import check_picture, plan_profile
        from narrowband.report.tables import RELATIVE_ERROR, plan_table

        check_output(self.output, self.plot, self.json, reads=(self.gradients, self.before))
        check_picture(self.plot)
        if self.min_numel < 1:
            raise ValueError(f"min_numel={self.min_numel} must be at least 1")
        if self.ranks < 1:
            raise ValueError(f"ranks={self.ranks} must be at least 1")
        policy = self._policy()
        traffic = Traffic(self.ranks, policy.start)
        layers = _layers(self.gradients, self.min_numel)
        if self.before is not None:
            before = _layers(self.before, self.min_numel)
            _check_same(layers, before, self.gradients, self.before)
            policy.decide(before, step=0, traffic=traffic)
        plan = policy.decide(layers, step=0, traffic=traffic)
        rows, whole = rows_of(plan, {name: float(x.double().norm()) for name, x in layers.items()})
        with written_first(lambda: self._write(plan, rows, whole)):
            console.print(plan_table(rows, whole))
            console.print(RELATIVE_ERROR, style="dim", markup=False, highlight=False)
            if whole["times_fewer"] is not None:
                console.print(
                    f"among {counted(self.ranks, 'rank')} {whole['times_fewer']:.2f} times fewer bytes than "
                    f"{plan.reference} for all layers"
                    + (", at no more error" if plan.budget is not None and self.alpha <= 1 else ""),
                    highlight=False,
                )
        for written in (self.output, self.json):
            if written is not None:
                console.print(f"written: {written}", style="dim", markup=False, highlight=False)
        if self.plot is not None:
            plan_profile(plan, self.plot)
            console.print(f"drawn: {self.plot}", style="dim", markup=False, highlight=False)
        return DONE

    def unused(self) -> dict[str, str]:
        """Return why some options say nothing to the policy."""
        return {
            name: f"says nothing to --policy {self.policy}: it is for {' and '.join(policies)}. Leave it out, or "
            "choose such a policy"
            for name, policies in _FOR.items()
            if self.policy not in policies
        }

    def _write(self, plan: Plan, rows: list[dict[str, Any]], whole: dict[str, Any]) -> None:
        from narrowband.report.record import provenance, write_json

        if self.output is not None:
            plan.save(self.output)
        if self.json is not None:
            config = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}
            for name in ("output", "plot", "json"):  # they decide nothing
                del config[name]
            write_json(self.json, provenance() | {"config": config, "rows": rows, "all": whole})

    def _policy(self) -> Policy:
        from narrowband.adapt import Accordion, Constant, GlobalTopK, HardThreshold, KMeans, LGreCo

        choices = self.choices or None
        accordion = Accordion(low=self.low, high=self.high, eta=self.eta)
        made: dict[Name, Policy] = {}
        if self.policy == "kmeans":  # created only on request: it needs scikit-learn
            made["kmeans"] = KMeans(self.reference, choices, self.clusters)
        elif self.policy.startswith("lgreco"):
            reference: str | Policy = self.reference if self.policy == "lgreco" else accordion
            made[self.policy] = LGreCo(
                reference, choices, alpha=self.alpha, metric=self.metric, discretization=self.discretization
            )
        else:
            made |= {
                "constant": Constant(self.reference),
                "accordion": accordion,
                "global-topk": GlobalTopK(self.density),
                "threshold": HardThreshold(self.value),
            }
        return made[self.policy]


def rows_of(plan: Plan, norms: Mapping[str, float]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return JSON-able rows of a plan's layers, and the same of all layers together.

    Args:
        plan: the plan.
        norms: layer → L2 norm of the gradient that the plan was made from.

    Returns:
        Rows of ``layer``, ``shape``, ``spec``, ``nbytes``, ``ratio`` (to no compression) and ``relative_error``; and
        the last three of all layers, with ``policy``, ``ranks``, ``dense_nbytes``, ``reference``, ``reference_nbytes``
        and ``times_fewer`` (than those of the reference). None: not known, or nothing is sent.
    """

    def numbers(nbytes: float, ratio: float, error: float | None, norm: float) -> dict[str, Any]:
        relative = None if error is None or not norm else (error / norm) ** 2  # ‖p − C(p)‖² / ‖p‖²
        return {"nbytes": nbytes, "ratio": ratio if nbytes else None, "relative_error": relative}

    rows = [
        {"layer": layer.name, "shape": list(layer.shape), "spec": layer.spec}
        | numbers(layer.nbytes, plan.layer_ratio(layer), layer.error, norms[layer.name])
        for layer in plan.layers
    ]
    errors = [layer.error for layer in plan.layers]
    error = None if None in errors else math.hypot(*(each for each in errors if each is not None))
    reference = plan.reference_nbytes
    return rows, {
        "policy": plan.policy,
        "ranks": plan.world_size,
        **numbers(plan.nbytes, plan.ratio, error, math.hypot(*norms.values())),
        "dense_nbytes": plan.dense_nbytes,
        "reference": plan.reference,
        "reference_nbytes": reference,
        "times_fewer": reference / plan.nbytes if reference is not None and plan.nbytes else None,
    }


def _layers(path: Path, min_numel: int) -> dict[str, Tensor]:
    """Load the gradients of a file that would be compressed.

    Raises:
        ValueError: the file does not exist, or holds something else.
    """
    import torch

    layers = {name: x for name, x in _tensors(path).items() if x is not None and x.dim() > 1 and x.numel() >= min_numel}
    if not layers:
        raise ValueError(f"{path}: no tensor has at least 2 dimensions and at least min_numel={min_numel} elements")
    for name, x in layers.items():
        if x.layout != torch.strided or not x.is_floating_point():
            raise ValueError(
                f"{path}: {name!r} is a tensor of {x.dtype}, {x.layout}; expected a dense tensor of a floating-point "
                "dtype"
            )
    return layers


_WRITE_ONE = "torch.save({name: p.grad for name, p in model.named_parameters()}, file) writes one"


def _tensors(path: Path) -> dict[str, Tensor | None]:
    import warnings

    import torch

    if not path.exists():
        raise ValueError(f"there is no file {path}; {_WRITE_ONE}")
    if not path.is_file():
        raise ValueError(f"{path} is a folder; give a file that holds gradients")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about pickles that torch did not write
            found = torch.load(path, map_location="cpu", weights_only=True)
    except PermissionError:
        raise
    except Exception as error:  # torch.load may raise anything on arbitrary bytes
        raise ValueError(
            f"{path} does not hold gradients: it was not written by torch.save, is incomplete, or holds other objects "
            f"than tensors; {_WRITE_ONE}"
        ) from error
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and (x is None or isinstance(x, torch.Tensor)) for name, x in found.items()
    ):
        raise ValueError(f"{path} must hold a dict of tensors, name → gradient; {_WRITE_ONE}")
    return found


def _check_same(layers: dict[str, Tensor], before: dict[str, Tensor], path: Path, path_before: Path) -> None:
    """Check that both files have the same layers. Norms are compared by name, and another model's would seem new."""
    other = sorted(
        name for name in layers.keys() | before.keys()
        if name not in layers or name not in before or layers[name].shape != before[name].shape
    )  # fmt: skip
    if other:
        raise ValueError(
            f"{path_before} and {path} are gradients of different models: {', '.join(other[:3])}"
            f"{' …' if len(other) > 3 else ''} is missing in one file or has another shape there; give two files of "
            "the same model"
        )
