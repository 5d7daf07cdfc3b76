"""ONNX bundles on ONNX Runtime."""
