import Foundation
import Observation
import SpeculativeDecoding

/// What the benchmark screen shows and the work behind it.
@MainActor @Observable
public final class BenchmarkModel {
    /// A line of the result.
    public struct Row: Sendable, Identifiable {
        public let mode: Mode
        public let tokensPerSecond: Double
        public let tokensPerStep: Double
        public let firstTokenMs: Double

        public var id: Mode { mode }
    }

    /// Empty lines stand between them.
    public var prompts = """
        CREATE TABLE singer (name, age, country)
        How many singers are older than 40?

        CREATE TABLE city (name, people, country)
        Which cities of France have more than 100000 people?
        """
    public var rounds = 3
    public var maxTokens = 64
    public private(set) var rows: [Row] = []
    public private(set) var speedup: Double?
    public private(set) var costs: [Cost] = []
    /// The share that is done.
    public private(set) var progress = 0.0
    /// The report, as `ssdevice bench --json` writes it.
    public private(set) var file: URL?
    public private(set) var status = ""
    public private(set) var task: Task<Void, Never>?

    private let demo: DemoModel
    private let folder: URL
    private let modes: [Mode]?
    private let timedCalls: Int

    /// `folder`: where reports go. `modes`: nil for all that a bundle has.
    public init(_ demo: DemoModel, folder: URL, modes: [Mode]? = nil, timedCalls: Int = 40) {
        self.demo = demo
        self.folder = folder
        self.modes = modes
        self.timedCalls = timedCalls
    }

    public func run() {
        guard task == nil, demo.task == nil else { return }
        (status, progress, file) = ("", 0, nil)
        task = Task {
            defer { task = nil }
            do {
                let benchmark = Benchmark(
                    generator: try await demo.open(),
                    prompts: prompts.components(separatedBy: "\n\n").filter { !$0.allSatisfy(\.isWhitespace) },
                    rounds: rounds, maxTokens: maxTokens, modes: modes, timedCalls: timedCalls
                )
                try take(await benchmark.run { await self.show($0) })
            } catch {
                status = error is CancellationError ? "" : error.localizedDescription
            }
        }
    }

    public func cancel() {
        task?.cancel()
    }

    private func show(_ share: Double) {
        progress = share
    }

    private func take(_ report: BenchmarkReport) throws {
        rows = report.modes.map {
            Row(
                mode: $0.mode, tokensPerSecond: $0.tokensPerSecond.median, tokensPerStep: $0.tokensPerStep,
                firstTokenMs: $0.ttftMs.median
            )
        }
        speedup = report.speedup
        costs = report.costs
        let written = folder.appending(path: "bench-\(report.setting.bundle)-\(report.setting.app).json")
        try report.write(to: written)
        file = written
        if !report.differing.isEmpty { status = "modes differ on some prompts" }
    }
}
