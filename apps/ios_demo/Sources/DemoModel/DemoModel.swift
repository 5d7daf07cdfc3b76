import Foundation
import Observation
import SpeculativeDecoding
import SpeculativeDecodingCoreML

/// What the screen shows and the work behind it.
@MainActor @Observable
public final class DemoModel {
    public private(set) var bundles: [URL] = []
    public var selected: URL? {
        didSet {
            guard selected != oldValue else { return }
            generator = nil
            apps = []
        }
    }
    /// Of the selected bundle, known once it is open.
    public private(set) var apps: [String] = []
    public var app = ""
    public var prompt = "CREATE TABLE singer (name, age, country)\nHow many singers are older than 40?"
    public private(set) var answer: [Run] = []
    /// By whether they were measured with speculation.
    public private(set) var speeds: [Bool: Speed] = [:]
    public private(set) var status = ""
    public private(set) var task: Task<Void, Never>?

    private var generator: Generator?
    private let places: [URL]

    /// `places`: folders to look for bundles in.
    public init(places: [URL]) {
        self.places = places
    }

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
    }

    public func run(speculate: Bool) {
        guard task == nil, let selected else { return }
        answer = []
        task = Task {
            defer { task = nil }
            do {
                let generator = try await open(selected)
                try await generator.use(app)
                var speed = Speed()
                for try await run in try await generator.answer(prompt, speculate: speculate) {
                    answer.append(run)
                    speed.add(run)
                    speeds[speculate] = speed
                }
                status = ""
            } catch {
                status = error.localizedDescription
            }
        }
    }

    public func cancel() {
        task?.cancel()
    }

    private func open(_ folder: URL) async throws -> Generator {
        if let generator { return generator }
        status = "Loading \(folder.lastPathComponent). The first time on a device can take minutes."
        let opened = try await Generator(folder: folder)
        generator = opened
        apps = opened.bundle.manifest.apps.map(\.name)
        if !apps.contains(app) { app = opened.bundle.manifest.defaultApp }
        speeds = [:]
        return opened
    }
}
