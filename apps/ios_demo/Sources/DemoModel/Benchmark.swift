import Foundation
import SpeculativeDecoding

/// Measures the same prompts in every decoding mode, as `ssdevice bench` does.
struct Benchmark {
    static let warmUpPrompts = 2

    let generator: Generator
    let prompts: [String]
    let rounds: Int
    let maxTokens: Int
    /// Nil for all that the app has the functions for.
    var modes: [Mode]?
    /// Calls of each function for its cost.
    var timedCalls = 40

    /// `progress`: called with the share that is done. Throws `BundleError.request` if no prompt fits, or if the device
    /// is too warm for times to count.
    func run(progress: @Sendable (Double) async -> Void) async throws -> BenchmarkReport {
        let loads = MachineLoad.averages
        var ids: [[Int32]] = []
        for prompt in prompts { ids.append(try await generator.promptIds(prompt)) }
        let geometry = generator.bundle.manifest.geometry
        let fitting = ids.filter { $0.count <= geometry.context }
        guard !fitting.isEmpty else { throw BundleError.request("no prompt fits the context of \(geometry.context)") }
        let (all, app) = (try await generator.modes(), await generator.app.name)
        var measured = all.filter { modes?.contains($0) ?? true }.map { Measured(mode: $0) }
        var acceptance = Acceptance(gamma: geometry.gamma, k: geometry.k)
        for prompt in fitting.prefix(Self.warmUpPrompts) {
            for lane in measured { _ = try await answer(prompt, lane.mode) }
        }
        for round in 0..<rounds {
            for lane in measured.indices { measured[lane].rounds.append([]) }
            for (at, prompt) in fitting.enumerated() {
                // Modes take turns to go first, so that a drift of the device affects all of them alike.
                for turn in measured.indices {
                    let lane = (turn + round + at) % measured.count
                    let answer = try await answer(prompt, measured[lane].mode)
                    measured[lane].rounds[round].append(answer)
                    if round == 0, measured[lane].mode == .speculative { acceptance.add(answer) }
                }
                await progress(Double(round * fitting.count + at + 1) / Double(rounds * fitting.count))
            }
        }
        let setting = BenchmarkSetting(
            generator.bundle, app: app, data: "prompts of the demo", rounds: rounds, maxTokens: maxTokens)
        let load = MachineLoad(before: loads)
        return BenchmarkReport(
            setting: setting, modes: measured, acceptance: acceptance, skipped: ids.count - fitting.count, load: load,
            costs: try await generator.costs(calls: timedCalls)
        )
    }

    private func answer(_ prompt: [Int32], _ mode: Mode) async throws -> MeasuredAnswer {
        guard Device.now.isFit else {
            throw BundleError.request("the device is warm or saves power: its times do not count")
        }
        try await generator.reset()  // nothing of the prompt is in the cache
        var found = MeasuredAnswer(promptTokens: prompt.count)
        for try await run in try await generator.answer(prompt, mode: mode, maxTokens: maxTokens) { found.add(run) }
        try Task.checkCancellation()
        return found
    }
}
