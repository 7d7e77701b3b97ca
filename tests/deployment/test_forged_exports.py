"""Exported detectors that were changed together with their hashes."""

import hashlib
import json

import numpy as np
import pytest
from helpers.refusals import refusal
from PIL import Image

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
from helpers.tiny_detector import SIDE, tiny_detector
from onnx import TensorProto, helper, numpy_helper

from lit_fedad.deployment.exported import read_sheet
from lit_fedad.deployment.served_detector import ServedDetector

WHITE = Image.new("RGB", (SIDE, SIDE), (255, 255, 255))


def classifier(folder, factor, classes):
    """Writes a classifier of three classes that finds class 0 in a black image, and class `factor` in a white one."""
    constants = [
        numpy_helper.from_array(np.array([1, 2, 3], np.int64), "all"),
        numpy_helper.from_array(np.array([2, 3], np.int64), "plane"),
        numpy_helper.from_array(np.array(factor, np.float32), "factor"),
    ]
    nodes = [
        helper.make_node("ReduceMean", ["pixels", "all"], ["mean"], keepdims=0),
        helper.make_node("Mul", ["mean", "factor"], ["scaled"]),
        helper.make_node("Cast", ["scaled"], ["class"], to=TensorProto.INT64),
        helper.make_node("ReduceMean", ["pixels", "plane"], ["probabilities"], keepdims=0),
    ]
    pixels = helper.make_tensor_value_info("pixels", TensorProto.FLOAT, ["batch", 3, SIDE, SIDE])
    outputs = [
        helper.make_tensor_value_info("class", TensorProto.INT64, ["batch"]),
        helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["batch", 3]),
    ]
    graph = helper.make_graph(nodes, "classes", [pixels], outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    tiny_detector(folder)
    (folder / "detector.onnx").write_bytes(model.SerializeToString())
    sheet = json.loads((folder / "detector.json").read_text())
    sheet |= {"alpha": None, "threshold": None, "colour": None, "classes": classes}
    sheet["sha256"]["detector.onnx"] = hashlib.sha256((folder / "detector.onnx").read_bytes()).hexdigest()
    (folder / "detector.json").write_text(json.dumps(sheet))
    return folder


@pytest.mark.parametrize("number", [3, -1])
def test_a_class_that_there_is_none_of_is_no_other_class(tmp_path, number):
    served = ServedDetector(classifier(tmp_path, number, ["a", "b", "c"]))
    with refusal(f"^it gives 3 probabilities and class {number}, and detector.json names 3 classes"):
        served(WHITE)


def test_classes_of_another_detector_are_refused_before_anybody_asks(tmp_path):
    assert ServedDetector(classifier(tmp_path / "own", 2, ["a", "b", "c"]))(WHITE).words["class"] == "c"
    with refusal("does not score an image as the files beside it say .*detector.json names 2 classes"):
        ServedDetector(classifier(tmp_path / "other", 2, ["a", "b"]))


@pytest.mark.parametrize("alpha", [-5, 0, 1, 1e308])
def test_a_promise_that_is_no_rate_is_refused(tmp_path, alpha):
    sheet = json.loads((tiny_detector(tmp_path) / "detector.json").read_text())
    (tmp_path / "detector.json").write_text(json.dumps({**sheet, "alpha": alpha}))
    with refusal(r"detector\.json: cannot be read \(alpha=.* is no rate above 0 and below 1\)"):
        read_sheet(tmp_path)
