"""An exported detector of a few operations, whose outputs can be computed by hand."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper

SIDE, THRESHOLD = 8, 0.5


def tiny_detector(folder: Path, side: int = SIDE, page: int | None = None) -> Path:
    """Writes a detector whose map is the mean of the channels, whose score is the mean of the map."""
    constants = [
        numpy_helper.from_array(np.array([1], np.int64), "channels"),
        numpy_helper.from_array(np.array([1, 2], np.int64), "plane"),
        numpy_helper.from_array(np.array(THRESHOLD, np.float32), "threshold"),
        numpy_helper.from_array(np.array(1, np.float32), "one"),
    ]
    nodes = [
        helper.make_node("ReduceMean", ["pixels", "channels"], ["anomaly_map"], keepdims=0),
        helper.make_node("ReduceMean", ["anomaly_map", "plane"], ["image_score"], keepdims=0),
        helper.make_node("Sub", ["one", "image_score"], ["p_value"]),
        helper.make_node("Greater", ["image_score", "threshold"], ["decision"]),
    ]
    shapes = {"anomaly_map": ["batch", side, side], "image_score": ["batch"], "p_value": ["batch"]}
    outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in shapes.items()]
    outputs.append(helper.make_tensor_value_info("decision", TensorProto.BOOL, ["batch"]))
    pixels = helper.make_tensor_value_info("pixels", TensorProto.FLOAT, ["batch", 3, side, side])
    graph = helper.make_graph(nodes, "tiny", [pixels], outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    how = {"size": side, "fit": "squeeze", "resize": None, "mode": "RGB", "page": page}
    files = {
        "detector.onnx": model.SerializeToString(),
        "preprocessing.json": json.dumps(how).encode(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    sheet = {
        "format": 1,
        "name": "tiny",
        "alpha": 0.01,
        "threshold": THRESHOLD,
        "colour": THRESHOLD,
        "classes": [],
        "sha256": {name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
    }
    (folder / "detector.json").write_text(json.dumps(sheet))
    return folder
