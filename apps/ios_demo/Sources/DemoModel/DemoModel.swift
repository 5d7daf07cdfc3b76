import Foundation
import Observation
import SpeculativeDecoding
import SpeculativeDecodingCoreML

/// What the screen shows and the work behind it.
@MainActor @Observable
public final class DemoModel {
    /// A message of the user and what was answered.
    public struct Exchange: Sendable, Identifiable {
        public let id: Int
        public let prompt: String
        public internal(set) var answer: [Run] = []

        public var text: String { answer.map(\.text).joined() }
    }

    public private(set) var bundles: [URL] = []
    public var selected: URL? {
        didSet {
            guard selected != oldValue else { return }
            generator = nil
            apps = []
            exchanges = []
        }
    }
    /// Of the selected bundle, known once it is open.
    public private(set) var apps: [String] = []
    /// A conversation is one app's.
    public var app = "" {
        didSet {
            if app != oldValue { exchanges = [] }
        }
    }
    public var prompt = "CREATE TABLE singer (name, age, country)\nHow many singers are older than 40?"
    /// Whether the next prompt goes on with the conversation.
    public var continues = false
    public private(set) var exchanges: [Exchange] = []
    /// By whether they were measured with speculation.
    public private(set) var speeds: [Bool: Speed] = [:]
    public private(set) var device = Device.now
    public private(set) var status = ""
    public private(set) var task: Task<Void, Never>?

    private var generator: Generator?
    private let places: [URL]
    private let compiled: CompiledModels

    /// `places`: folders to look for bundles in.
    public init(places: [URL], compiled: CompiledModels = .standard) {
        self.places = places
        self.compiled = compiled
    }

    /// The last answer.
    public var answer: [Run] { exchanges.last?.answer ?? [] }

    /// Bundles are folders with a manifest.
    public func findBundles() {
        bundles = places.flatMap { place in
            let found = try? FileManager.default.contentsOfDirectory(at: place, includingPropertiesForKeys: nil)
            return (found ?? []).filter {
                FileManager.default.fileExists(atPath: $0.appending(path: "manifest.json").path)
            }
        }
        .sorted { $0.lastPathComponent < $1.lastPathComponent }
        selected = selected ?? bundles.first
        status = bundles.isEmpty ? "Put a bundle folder into \(places.first?.path ?? "the app")" : ""
        do {
            try compiled.removeAll(but: bundles)
        } catch {
            status = error.localizedDescription
        }
    }

    public func run(speculate: Bool) {
        guard task == nil, selected != nil else { return }
        task = Task {
            defer { task = nil }
            do {
                let generator = try await open()
                let goesOn = continues && !exchanges.isEmpty
                if !goesOn {
                    exchanges = []
                    try await generator.reset()
                }
                let answer = try await continues
                    ? generator.chat(prompt, speculate: speculate) : generator.answer(prompt, speculate: speculate)
                exchanges.append(Exchange(id: exchanges.count, prompt: prompt))
                var speed = Speed()
                for try await run in answer {
                    exchanges[exchanges.count - 1].answer.append(run)
                    speed.add(run)
                    speeds[speculate] = speed
                    device = .now
                }
                status = ""
            } catch {
                status = error.localizedDescription
            }
        }
    }

    /// The answer of the default app of the first bundle, for callers without a screen.
    public static func answer(
        to prompt: String, places: [URL], maxTokens: Int = 256, compiled: CompiledModels = .standard
    ) async throws -> String {
        let model = DemoModel(places: places, compiled: compiled)
        model.findBundles()
        let generator = try await model.open()
        var text = ""
        for try await run in try await generator.answer(prompt, maxTokens: maxTokens) { text += run.text }
        return text
    }

    public func cancel() {
        task?.cancel()
    }

    /// The generator of the selected bundle, as the selected app.
    func open() async throws -> Generator {
        guard let selected else { throw BundleError.request("no bundle is selected") }
        let known = generator
        if known == nil {
            status = "Loading \(selected.lastPathComponent). The first time on a device can take minutes."
        }
        let opened = if let known { known } else { try await Generator(folder: selected, compiled: compiled) }
        if known == nil {
            generator = opened
            apps = opened.bundle.manifest.apps.map(\.name)
            if !apps.contains(app) { app = opened.bundle.manifest.defaultApp }
            speeds = [:]
        }
        if await opened.app.name != app { try await opened.use(app) }
        return opened
    }
}
