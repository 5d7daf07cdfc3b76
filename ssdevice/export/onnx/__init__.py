"""The ONNX target: graphs for ONNX Runtime."""
