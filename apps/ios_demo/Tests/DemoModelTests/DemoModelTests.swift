import DemoModel
import Foundation
import SpeculativeDecodingCoreML
import XCTest

/// The screen's model on the bundle that `make swift-test` exports.
@MainActor
final class DemoModelTests: XCTestCase, @unchecked Sendable {
    private let compiled = CompiledModels(
        folder: FileManager.default.temporaryDirectory.appending(path: UUID().uuidString))

    func testBothButtonsShowTheSameAnswer() async throws {
        let model = DemoModel(places: [try made()], compiled: compiled)
        model.findBundles()
        XCTAssertEqual(model.selected?.lastPathComponent, "bundle")
        model.run(speculate: true)
        await model.task?.value
        let fast = model.answer.map(\.text).joined()
        XCTAssertEqual(model.status, "")
        XCTAssertEqual(model.apps, ["sql", "e2e", "base"])
        XCTAssertTrue(fast.hasPrefix("SELECT"))
        XCTAssertTrue(model.answer.flatMap(\.pieces).contains(where: \.accepted))
        model.run(speculate: false)
        await model.task?.value
        XCTAssertEqual(model.answer.map(\.text).joined(), fast)
        let (speculative, plain) = (try XCTUnwrap(model.speeds[true]), try XCTUnwrap(model.speeds[false]))
        XCTAssertGreaterThan(speculative.tokensPerStep, plain.tokensPerStep)
        XCTAssertGreaterThan(model.device.peakMB, 1)
    }

    func testAConversationGoesOnUntilItIsLeft() async throws {
        let model = DemoModel(places: [try made()], compiled: compiled)
        model.findBundles()
        model.continues = true
        for prompt in [model.prompt, "And how many are from France?"] {
            model.prompt = prompt
            model.run(speculate: true)
            await model.task?.value
            XCTAssertEqual(model.status, "")
        }
        XCTAssertEqual(model.exchanges.count, 2)
        XCTAssertTrue(model.exchanges.allSatisfy { !$0.text.isEmpty })
        model.continues = false
        model.run(speculate: false)
        await model.task?.value
        XCTAssertEqual(model.exchanges.map(\.prompt), ["And how many are from France?"])
    }

    func testAnAnswerWithoutAScreen() async throws {
        let prompt = DemoModel(places: []).prompt
        let text = try await DemoModel.answer(to: prompt, places: [made()], maxTokens: 3, compiled: compiled)
        XCTAssertTrue(text.hasPrefix("SELECT"), text)
    }

    func testAnotherAppAndStop() async throws {
        let model = DemoModel(places: [try made()], compiled: compiled)
        model.findBundles()
        model.app = "e2e"
        model.prompt = "name[Alimentum], area[city centre], familyFriendly[no]"
        model.run(speculate: false)
        let task = try XCTUnwrap(model.task)
        while model.answer.count < 3 { try await Task.sleep(for: .milliseconds(10)) }
        model.cancel()
        await task.value
        XCTAssertNil(model.task)
        XCTAssertNil(model.answer.last?.reason)
        XCTAssertTrue("Alimentum is a non-family-friendly".hasPrefix(model.answer.map(\.text).joined().prefix(12)))
    }

    func testWhatGoesWrongIsShown() async throws {
        let place = FileManager.default.temporaryDirectory.appending(path: UUID().uuidString)
        let model = DemoModel(places: [place], compiled: compiled)
        model.findBundles()
        XCTAssertTrue(model.status.contains(place.path))
        try FileManager.default.createDirectory(at: place.appending(path: "broken"), withIntermediateDirectories: true)
        defer { try? FileManager.default.removeItem(at: place) }
        try Data("{}".utf8).write(to: place.appending(path: "broken/manifest.json"))
        model.findBundles()
        model.run(speculate: true)
        await model.task?.value
        XCTAssertTrue(model.status.contains("manifest.json"), model.status)
    }

    private func made() throws -> URL {
        let folder = URL(filePath: #filePath).appending(path: "../../../../../build/swift").standardizedFileURL
        guard FileManager.default.fileExists(atPath: folder.appending(path: "bundle").path) else {
            throw XCTSkip("make swift-test exports a bundle")
        }
        return folder
    }
}
