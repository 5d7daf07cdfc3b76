import Foundation
import SpeculativeDecoding

/// What was measured.
struct BenchmarkSetting: Decodable {
    let bundle: String
    let app: String
    let data: String
    let rounds: Int
    let maxTokens: Int
    let ssdevice: String?
    let target: String
    let precision: String
    let schedule: String
    let mode: String?
    let tree: [[Int]]
    let gamma: Int
    let k: Int
    let context: Int
    let parameters: Int
    let modelBytes: Int
    /// Of the app's own files: none, an app of a Core ML bundle is a function of its package.
    let appBytes: Int

    /// Tokens that one step can emit.
    var emitted: Int { 1 + (tree.last?.count ?? 0) }
}

extension BenchmarkSetting {
    init(_ bundle: ModelBundle, app: String, data: String, rounds: Int, maxTokens: Int) {
        let (manifest, geometry) = (bundle.manifest, bundle.manifest.geometry)
        self.init(
            bundle: bundle.folder.lastPathComponent, app: app, data: data, rounds: rounds, maxTokens: maxTokens,
            ssdevice: manifest.tools["ssdevice"], target: manifest.target, precision: manifest.precision,
            schedule: manifest.schedule, mode: manifest.mode, tree: geometry.tree, gamma: geometry.gamma,
            k: geometry.k, context: geometry.context, parameters: manifest.model.parameters,
            modelBytes: manifest.files.values.reduce(0) { $0 + $1.size }, appBytes: 0
        )
    }

    fileprivate var json: [String: Any] {
        [
            "bundle": bundle, "app": app, "data": data, "threads": 0, "kernels": false, "rounds": rounds,
            "max_tokens": maxTokens, "ssdevice": orNull(ssdevice), "target": target, "precision": precision,
            "schedule": schedule, "mode": orNull(mode), "tree": tree, "gamma": gamma, "k": k, "context": context,
            "parameters": parameters, "app_bytes": appBytes, "model_mb": Double(modelBytes) / 1e6,
            "versions": [String: String](),
        ]
    }
}

/// A measurement as the object that `ssdevice bench --json` writes, with `cost_by_width` added.
///
/// What only Python can tell is null: bounds of the speed-up, peak memory of a mode, the load by other processes.
struct BenchmarkReport {
    let setting: BenchmarkSetting
    /// In the order of `Mode.allCases`, with equal prompts.
    let modes: [Measured]
    let acceptance: Acceptance
    var skipped = 0
    var load = MachineLoad(before: MachineLoad.averages)
    var costs: [Cost] = []

    private var baseline: Measured? {
        let plain = modes.filter { $0.mode == .plain || $0.mode == .plainStep }
        return plain.max { $0.tokensPerSecond.median < $1.tokensPerSecond.median }
    }

    /// Decoding time of the faster plain mode over that of the speculative one.
    var speedup: Double? {
        guard let plain = baseline?.seconds, let drafted = modes.first(where: { $0.mode == .speculative })?.seconds,
            !plain.isEmpty, plain.count == drafted.count
        else { return nil }
        return plain.reduce(0, +) / drafted.reduce(0, +)
    }

    /// Mode -> prompts (from 0) whose tokens in any round differ from the first mode's first round.
    var differing: [String: [Int]] {
        let pairs = modes.map { measured in
            let prompts = measured.answers.indices.filter { at in
                measured.rounds.contains { $0[at].tokens != modes[0].answers[at].tokens }
            }
            return (measured.mode.rawValue, prompts)
        }
        return Dictionary(uniqueKeysWithValues: pairs.filter { !$0.1.isEmpty })
    }

    var json: [String: Any] {
        let arms = modes.map { ($0.mode.rawValue, json(of: $0)) }
        let interval: [String: Any]? = speedup.map {
            ["estimate": $0, "low": NSNull(), "high": NSNull(), "confidence": 0.95]
        }
        let widths: [[String: Any]] = costs.map {
            ["function": $0.function, "width": $0.width, "milliseconds": $0.milliseconds]
        }
        let measured: [String: Any] = [
            "arms": Dictionary(uniqueKeysWithValues: arms), "equal": differing.isEmpty,
            "differing_prompts": differing, "baseline": orNull(baseline?.mode.rawValue),
            "speedup": orNull(speedup), "speedup_interval": orNull(interval),
            "acceptance_by_stream_and_rank": acceptance.table, "quality": [String: Any](), "cost_by_width": widths,
        ]
        return setting.json.merging(measured) { $1 }.merging([
            "prompts": modes.first?.answers.count ?? 0, "skipped_prompts": skipped, "valid": true,
            "machine": load.json,
        ]) { $1 }
    }

    func write(to file: URL) throws {
        try JSONSerialization.data(withJSONObject: json, options: [.prettyPrinted, .sortedKeys]).write(to: file)
    }

    private func json(of measured: Measured) -> [String: Any] {
        let spread: [String: Any] = [
            "tokens_per_second": measured.tokensPerSecond.json, "ttft_ms": measured.ttftMs.json,
            "native_ms_per_step": measured.nativeMsPerStep.json,
        ]
        var found: [String: Any] = [
            "tokens_per_second": measured.tokensPerSecond.median, "tokens_per_step": measured.tokensPerStep,
            "ttft_ms": measured.ttftMs.median,
            "prefill_tokens_per_second": measured.prefillTokensPerSecond.median,
            "host_us_per_step": measured.hostUsPerStep.median,
            "native_ms_per_step": measured.nativeMsPerStep.median, "resident_mb": NSNull(),
            "peak_rss_mb": NSNull(),
            "prompt_tokens_per_second": measured.promptTokensPerSecond.map { orNull($0) },
            "tokens": measured.answers.map(\.tokens.count).reduce(0, +),
            "steps": measured.answers.map(\.steps).reduce(0, +), "spread": spread,
        ]
        if measured.mode == .speculative { found["accepted_histogram"] = acceptance.histogram(setting.emitted) }
        return found
    }
}

private func orNull(_ value: Any?) -> Any { value ?? NSNull() }
