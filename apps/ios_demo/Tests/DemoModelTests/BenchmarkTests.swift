import Foundation
import SpeculativeDecoding
import SpeculativeDecodingCoreML
import XCTest

@testable import DemoModel

/// The report of the benchmark screen is that of `ssdevice bench`.
@MainActor
final class BenchmarkTests: XCTestCase, @unchecked Sendable {
    private struct Recording: Decodable {
        struct Given: Decodable {
            struct Arm: Decodable {
                let mode: String
                /// Round by round.
                let answers: [MeasuredAnswer]
            }

            let setting: BenchmarkSetting
            let skipped: Int
            let prompts: Int
            let modes: [Arm]
        }

        let given: Given
    }

    private let folder = URL(filePath: #filePath).appending(path: "../../../../../build/swift").standardizedFileURL

    private func recorded() throws -> (given: Recording.Given, report: [String: Any]) {
        let file = folder.appending(path: "bench.json")
        guard FileManager.default.fileExists(atPath: file.path) else { throw XCTSkip("make swift-test writes it") }
        let (data, decoder) = (try Data(contentsOf: file), JSONDecoder())
        decoder.keyDecodingStrategy = .convertFromSnakeCase
        let whole = try JSONSerialization.jsonObject(with: data) as? [String: Any]
        let report = try XCTUnwrap(whole?["report"] as? [String: Any])
        return (try decoder.decode(Recording.self, from: data).given, report)
    }

    func testNumbersAreThoseOfPython() async throws {
        let (given, expected) = try recorded()
        let modes = try given.modes.map { arm in
            let rounds = stride(from: 0, to: arm.answers.count, by: given.prompts).map {
                Array(arm.answers[$0..<$0 + given.prompts])
            }
            return Measured(mode: try XCTUnwrap(Mode(rawValue: arm.mode)), rounds: rounds)
        }
        var acceptance = Acceptance(gamma: given.setting.gamma, k: given.setting.k)
        modes.first { $0.mode == .speculative }?.answers.forEach { acceptance.add($0) }
        let report = BenchmarkReport(
            setting: given.setting, modes: modes, acceptance: acceptance, skipped: given.skipped)
        let data = try JSONSerialization.data(withJSONObject: report.json)
        let found = try XCTUnwrap(JSONSerialization.jsonObject(with: data) as? [String: Any])
        XCTAssertEqual(Set(found.keys), Set(expected.keys).union(["cost_by_width"]))
        let own = ["machine", "cost_by_width", "speedup_interval"]
        compare(found.filter { !own.contains($0.key) }, expected.filter { !own.contains($0.key) }, "report")
        for key in ["machine", "speedup_interval"] {
            let (mine, theirs) = (found[key] as? [String: Any], expected[key] as? [String: Any])
            XCTAssertTrue(Set(try XCTUnwrap(mine).keys).isSuperset(of: try XCTUnwrap(theirs).keys), key)
        }
    }

    /// Python rounds to 2 digits or more.
    private func compare(_ found: Any, _ expected: Any, _ place: String) {
        switch (found, expected) {
        case (let mine as [String: Any], let theirs as [String: Any]):
            XCTAssertEqual(Set(mine.keys), Set(theirs.keys), place)
            for (key, value) in mine { compare(value, theirs[key] ?? "nothing", "\(place).\(key)") }
        case (let mine as [Any], let theirs as [Any]):
            XCTAssertEqual(mine.count, theirs.count, place)
            for (at, pair) in zip(mine, theirs).enumerated() { compare(pair.0, pair.1, "\(place)[\(at)]") }
        case (let mine as NSNumber, let theirs as NSNumber):
            XCTAssertEqual(mine.doubleValue, theirs.doubleValue, accuracy: 0.006, place)
        default: XCTAssertEqual("\(found)", "\(expected)", place)
        }
    }

    func testTheScreenMeasuresABundle() async throws {
        guard FileManager.default.fileExists(atPath: folder.appending(path: "bundle").path) else {
            throw XCTSkip("make swift-test exports a bundle")
        }
        let place = FileManager.default.temporaryDirectory.appending(path: UUID().uuidString)
        try FileManager.default.createDirectory(at: place, withIntermediateDirectories: true)
        defer { try? FileManager.default.removeItem(at: place) }
        let demo = DemoModel(places: [folder], compiled: CompiledModels(folder: place.appending(path: "compiled")))
        demo.findBundles()
        let model = BenchmarkModel(demo, folder: place, modes: [.plain, .speculative], timedCalls: 1)
        model.prompts = "a\n\n" + String(repeating: "far too long ", count: 200)
        (model.rounds, model.maxTokens) = (2, 4)
        model.run()
        await model.task?.value
        XCTAssertEqual(model.status, "")
        XCTAssertEqual(model.rows.map(\.mode), [.plain, .speculative])
        XCTAssertEqual(model.progress, 1)
        XCTAssertEqual(model.costs.map(\.function), ["step", "prefill", "step_plain"])
        let data = try Data(contentsOf: XCTUnwrap(model.file))
        let written = try XCTUnwrap(JSONSerialization.jsonObject(with: data) as? [String: Any])
        XCTAssertEqual(Set(written.keys), Set(try recorded().report.keys).union(["cost_by_width"]))
        XCTAssertEqual(written["equal"] as? Bool, true)
        XCTAssertEqual(written["skipped_prompts"] as? Int, 1)
    }
}
