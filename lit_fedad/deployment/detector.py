"""A client's detector as a module from pixels to outputs, and as a graph."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from lit_fedad.contracts import Client, Prediction
from lit_fedad.core.errors import UserError, first_line
from lit_fedad.data.transform import ImageTransform
from lit_fedad.metrics.conformal import DecisionRule

Outputs = dict[str, Tensor]


class Detector(nn.Module):
    """Module that predicts what a client predicts, from pixels that are not normalised.

    Args:
        client: A trained client, on the CPU.
        transform: Its mean and deviation normalise pixels.
        rule: The client's decision rule; None for classifiers.
    """

    pixel_mean: Tensor
    pixel_std: Tensor
    threshold: Tensor
    edges: Tensor
    ranks: Tensor

    def __init__(self, client: Client, transform: ImageTransform, rule: DecisionRule | None = None) -> None:
        super().__init__()
        self.client = client
        self.register_buffer("pixel_mean", torch.tensor(transform.mean).view(-1, 1, 1))
        self.register_buffer("pixel_std", torch.tensor(transform.std).view(-1, 1, 1))
        if rule is not None:
            self.register_buffer("threshold", torch.tensor(rule.threshold))
            # The first edge counts no image: a graph cannot hold an empty tensor.
            self.register_buffer("edges", torch.cat([torch.tensor([-torch.inf]), rule.scores.edges]))
            counts = torch.cat([torch.zeros(1), rule.scores.counts.float()])
            self.register_buffer("ranks", counts / (rule.scores.total + 1))
            self.smallest = 1 / (rule.scores.total + 1)
        self.eval().requires_grad_(False)

    def normalise(self, pixels: Tensor) -> Tensor:
        """Normalises pixels to the input of the task.

        Args:
            pixels: Float32 in 0 .. 1 [B, C, H, W].

        Returns:
            Images [B, C, H, W].
        """
        return (pixels - self.pixel_mean) / self.pixel_std

    def outputs(self, prediction: Prediction) -> Outputs:
        """Names the outputs of a prediction.

        Args:
            prediction: Prediction of the client.

        Returns:
            The same as `forward`.
        """
        if self.client.task.kind == "classification":
            assert prediction.logits is not None
            probabilities = prediction.logits.softmax(1)
            return {"probabilities": probabilities, "class": probabilities.argmax(1)}
        score, maps = prediction.image_score, prediction.anomaly_map
        localised = {} if maps is None else {"anomaly_map": maps}
        p_value = self.smallest + (self.edges >= score[:, None]).float() @ self.ranks
        # NaN is not called normal.
        decision = ~(score <= self.threshold)
        return {"image_score": score, **localised, "p_value": p_value, "decision": decision}

    def forward(self, pixels: Tensor) -> Outputs:
        """Predicts images.

        Args:
            pixels: Float32 in 0 .. 1 [B, C, H, W], at the run's image size.

        Returns:
            ``image_score`` [B], ``anomaly_map`` [B, H, W] of tasks that localise, ``p_value`` [B] and ``decision``,
            bool [B]; of classifiers ``probabilities`` [B, K] and ``class``, int64 [B].
        """
        return self.outputs(self.client.predict_step({"image": self.normalise(pixels)}))


def trace(detector: Detector, transform: ImageTransform) -> ExportedProgram:
    """Traces a detector into a graph, for any number of images.

    Args:
        detector: The detector.
        transform: Gives number of channels and size of the images.

    Returns:
        The graph, with the parameters and buffers that it uses.

    Raises:
        UserError: If the client's prediction cannot be traced.
    """
    for module in detector.modules():  # exporters split in-place activations up, which takes far longer
        if "inplace" in vars(module):
            vars(module)["inplace"] = False
    example = torch.zeros(2, transform.channels, *transform.shape)
    with torch.no_grad():
        detector(example)  # lets the task compute what it computes once and keeps
    for tensor in (*detector.parameters(), *detector.buffers()):
        # Torch warns of views into a message and of tensors with their channels last.
        tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
    try:
        # With gradients, torch would trace parts that switch them off as graphs within the graph, and it cannot always
        # read these back.
        with torch.no_grad():
            shapes = {"pixels": {0: Dim("batch")}}
            program = torch.export.export(detector, (example,), dynamic_shapes=shapes, strict=False)
    except Exception as error:  # torch's tracer fails in many ways
        raise UserError(
            f"{type(detector.client).__name__}: its prediction cannot be exported ({first_line(error)}); it may not"
            " branch on values of tensors, and gives their number of images as x.shape[0], not len(x)"
        ) from error
    signature = program.graph_signature
    used = {*signature.inputs_to_parameters.values(), *signature.inputs_to_buffers.values()}
    for name in program.state_dict.keys() - used:  # such as a second, personal model
        del program.state_dict[name]
    return program


def output_shapes(program: ExportedProgram) -> dict[str, tuple[int, ...]]:
    """Lists names and shapes of a graph's outputs.

    Args:
        program: The graph, from `trace`.

    Returns:
        Shapes without the number of images, by name.
    """
    spec = program.call_spec.out_spec
    values = [node.meta["val"] for node in program.graph.output_node().args[0]]  # type: ignore[union-attr]
    assert spec is not None
    return {name: tuple(value.shape[1:]) for name, value in spec.unflatten(values).items()}
