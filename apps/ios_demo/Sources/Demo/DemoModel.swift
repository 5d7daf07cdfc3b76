import Foundation
import Observation
import SpeculativeDecoding

/// What the screen shows and the work behind it.
@MainActor @Observable
final class DemoModel {
    private(set) var bundles: [URL] = []
    var selected: URL? {
        didSet { if selected != oldValue { generator = nil } }
    }
    var prompt = "CREATE TABLE singer (name, age, country)\nHow many singers are older than 40?"
    private(set) var answer: [Run] = []
    private(set) var speeds: [Bool: Speed] = [:]
    private(set) var status = ""
    private(set) var task: Task<Void, Never>?

    private var generator: Generator?

    /// Bundles in the app's documents and in what it was shipped with: folders with a manifest.
    func findBundles() {
        let places = [URL.documentsDirectory, Bundle.main.resourceURL].compactMap { $0 }
        bundles = places.flatMap { place in
            let found = try? FileManager.default.contentsOfDirectory(at: place, includingPropertiesForKeys: nil)
            return (found ?? []).filter {
                FileManager.default.fileExists(atPath: $0.appending(path: "manifest.json").path)
            }
        }
        .sorted { $0.lastPathComponent < $1.lastPathComponent }
        selected = selected ?? bundles.first
        status = bundles.isEmpty ? "Put a bundle folder into \(URL.documentsDirectory.path)" : ""
    }

    func run(speculate: Bool) {
        guard task == nil, let selected else { return }
        answer = []
        task = Task {
            defer { task = nil }
            do {
                let generator = try await self.open(selected)
                let speed = try await generator.answer(prompt, speculate: speculate) { run, speed in
                    await self.show(run, speed, speculate)
                }
                speeds[speculate] = speed
                status = ""
            } catch {
                status = error.localizedDescription
            }
        }
    }

    func cancel() {
        task?.cancel()
    }

    private func open(_ folder: URL) async throws -> Generator {
        if let generator { return generator }
        status = "Loading \(folder.lastPathComponent). The first time on a device can take minutes."
        let opened = try await Generator(folder: folder)
        generator = opened
        speeds = [:]
        status = ""
        return opened
    }

    private func show(_ run: Run, _ speed: Speed, _ speculate: Bool) {
        answer.append(run)
        speeds[speculate] = speed
    }
}
