// What `ssdevice web` puts beside the sources.
declare module "*/ort.wasm.bundle.min.mjs" {
  export * from "onnxruntime-web";
}
declare module "*/tokenizers.min.mjs" {
  export * from "@huggingface/tokenizers";
}
