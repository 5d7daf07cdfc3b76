import Foundation
import SpeculativeDecodingCoreML
import XCTest

@testable import DemoModel

/// What both screens show after a user went through them, written for a picture of them.
@MainActor
final class ScreenTests: XCTestCase, @unchecked Sendable {
    private struct Screens: Codable {
        let chat: Chat
        let benchmark: Report
    }

    private struct Chat: Codable {
        struct Exchange: Codable {
            let prompt: String
            let pieces: [Piece]
        }

        struct Piece: Codable {
            let text: String
            let accepted: Bool
        }

        struct Rate: Codable {
            let tokensPerSecond: Double
            let tokensPerStep: Double
        }

        let bundles: [String]
        let selected: String?
        let apps: [String]
        let app: String
        let exchanges: [Exchange]
        let continues: Bool
        let prompt: String
        let speculative: Rate?
        let plain: Rate?
        let megabytes: Double
        let thermalState: String
        let status: String
    }

    private struct Report: Codable {
        struct Row: Codable {
            let mode: String
            let tokensPerSecond: Double
            let tokensPerStep: Double
            let firstTokenMs: Double
        }

        struct Cost: Codable {
            let function: String
            let width: Int
            let milliseconds: Double
        }

        let prompts: String
        let rounds: Int
        let maxTokens: Int
        let progress: Double
        let status: String
        let rows: [Row]
        let speedup: Double?
        let costs: [Cost]
        let file: String?
    }

    private let swift = URL(filePath: #filePath).appending(path: "../../../../../build/swift").standardizedFileURL

    func testAUserGoesThroughBothScreens() async throws {
        let bundle = swift.appending(path: "bundle")
        guard FileManager.default.fileExists(atPath: bundle.path) else {
            throw XCTSkip("make swift-test exports a bundle")
        }
        let place = FileManager.default.temporaryDirectory.appending(path: UUID().uuidString)
        try FileManager.default.createDirectory(at: place, withIntermediateDirectories: true)
        defer { try? FileManager.default.removeItem(at: place) }
        try FileManager.default.createSymbolicLink(
            at: place.appending(path: "base-7m-int8"), withDestinationURL: bundle)
        let model = DemoModel(places: [place], compiled: CompiledModels(folder: place.appending(path: "compiled")))
        let benchmark = BenchmarkModel(model, folder: place, modes: [.plain, .speculative], timedCalls: 1)
        model.findBundles()
        let chat = try await talk(model)
        let measured = try await measure(benchmark)
        try write(Screens(chat: chat, benchmark: measured), to: swift.appending(path: "screens.json"))
        let kept = try read(swift.appending(path: "../../apps/ios_demo/screens.json").standardizedFileURL)
        let old = "apps/ios_demo/screens.json is of another run: its README says how to make it again"
        XCTAssertEqual(kept.chat.exchanges.map(\.prompt), chat.exchanges.map(\.prompt), old)
        XCTAssertEqual(kept.chat.apps, chat.apps, old)
        XCTAssertEqual(kept.benchmark.prompts, measured.prompts, old)
        XCTAssertEqual(kept.benchmark.rows.map(\.mode), measured.rows.map(\.mode), old)
        XCTAssertEqual(kept.benchmark.costs.map(\.function), measured.costs.map(\.function), old)
    }

    /// The prompt that is there, with speculation; then a question about the answer, without.
    private func talk(_ model: DemoModel) async throws -> Chat {
        model.continues = true
        model.run(speculate: true)
        await model.task?.value
        model.prompt = "And how many are from France?"
        model.run(speculate: false)
        await model.task?.value
        let shown = show(model)
        XCTAssertEqual(shown.bundles, ["base-7m-int8"])
        XCTAssertEqual(shown.selected, "base-7m-int8")
        XCTAssertEqual(shown.app, "sql")
        XCTAssertEqual(shown.status, "")
        XCTAssertEqual(shown.exchanges.count, 2)
        XCTAssertEqual(shown.exchanges.map { $0.pieces.contains(where: \.accepted) }, [true, false])
        XCTAssertEqual(shown.exchanges.last?.prompt, shown.prompt)
        let (fast, slow) = (try XCTUnwrap(shown.speculative), try XCTUnwrap(shown.plain))
        XCTAssertGreaterThan(fast.tokensPerStep, slow.tokensPerStep)
        XCTAssertEqual(slow.tokensPerStep, 1)
        return shown
    }

    private func measure(_ model: BenchmarkModel) async throws -> Report {
        (model.rounds, model.maxTokens) = (2, 24)
        model.run()
        while model.progress == 0, model.task != nil { try await Task.sleep(for: .milliseconds(10)) }
        XCTAssertTrue(model.rows.isEmpty, "rows before the measurement ended")
        await model.task?.value
        let shown = show(model)
        XCTAssertEqual(shown.status, "")
        XCTAssertEqual(shown.progress, 1)
        XCTAssertEqual(shown.rows.map(\.mode), ["plain", "speculative"])
        XCTAssertEqual(shown.rows[0].tokensPerStep, 1)
        XCTAssertGreaterThan(shown.rows[1].tokensPerStep, 1)
        XCTAssertNotNil(shown.speedup)
        XCTAssertTrue(shown.costs.allSatisfy { $0.milliseconds > 0 })
        XCTAssertEqual(shown.file, "bench-base-7m-int8-sql.json")
        return shown
    }

    private func show(_ model: DemoModel) -> Chat {
        let rates = model.speeds.filter { $0.value.steps > 0 }.mapValues {
            Chat.Rate(tokensPerSecond: $0.tokensPerSecond, tokensPerStep: $0.tokensPerStep)
        }
        return Chat(
            bundles: model.bundles.map(\.lastPathComponent), selected: model.selected?.lastPathComponent,
            apps: model.apps, app: model.app,
            exchanges: model.exchanges.map { exchange in
                let pieces = exchange.answer.flatMap(\.pieces).filter { !$0.text.isEmpty }
                return Chat.Exchange(
                    prompt: exchange.prompt, pieces: pieces.map { Chat.Piece(text: $0.text, accepted: $0.accepted) })
            },
            continues: model.continues, prompt: model.prompt, speculative: rates[true], plain: rates[false],
            megabytes: model.device.peakMB, thermalState: model.device.thermalState, status: model.status)
    }

    private func show(_ model: BenchmarkModel) -> Report {
        Report(
            prompts: model.prompts, rounds: model.rounds, maxTokens: model.maxTokens, progress: model.progress,
            status: model.status,
            rows: model.rows.map {
                Report.Row(
                    mode: $0.mode.rawValue, tokensPerSecond: $0.tokensPerSecond, tokensPerStep: $0.tokensPerStep,
                    firstTokenMs: $0.firstTokenMs)
            },
            speedup: model.speedup,
            costs: model.costs.map {
                Report.Cost(function: $0.function, width: $0.width, milliseconds: $0.milliseconds)
            },
            file: model.file?.lastPathComponent)
    }

    private func write(_ screens: Screens, to file: URL) throws {
        let encoder = JSONEncoder()
        encoder.outputFormatting = [.prettyPrinted, .sortedKeys, .withoutEscapingSlashes]
        encoder.keyEncodingStrategy = .convertToSnakeCase
        try (encoder.encode(screens) + Data("\n".utf8)).write(to: file)
    }

    private func read(_ file: URL) throws -> Screens {
        let decoder = JSONDecoder()
        decoder.keyDecodingStrategy = .convertFromSnakeCase
        return try decoder.decode(Screens.self, from: Data(contentsOf: file))
    }
}
