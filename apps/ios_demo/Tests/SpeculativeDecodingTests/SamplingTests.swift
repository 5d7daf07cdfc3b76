import XCTest

@testable import SpeculativeDecoding

/// The noise, and the answers of the test vectors that hosts in all languages share: `tests/vectors` says how to read them.
final class SamplingTests: XCTestCase {
    private struct Vectors: Decodable {
        struct Words: Decodable {
            let seed: String
            let number, position, kind: UInt32
            let words: [UInt32]
        }

        struct Numbers: Decodable {
            let seed: String
            let position: Int
            let ids: [Int]
            let noise: [Double]
        }

        struct Logits: Decodable {
            let step: UInt32
            let first: [Float]
        }

        struct Choice: Decodable {
            let vocab: Int
            let sampling: AskedSampling
            let seed: String
            let prompt, stops, tokens: [Int32]
            let left: [Int]
        }

        /// One choice from logits that no good model returns.
        struct Row: Decodable {
            let logits: [String]
            let sampling: AskedSampling
            let seed: String
            let prompt, stops: [Int32]
            let token: Int32?
            let refused: String?
        }

        /// What cannot be asked for, and how messages about it end.
        struct Options: Decodable {
            let sampling: AskedSampling
            let message: String
        }

        let philox: [Words]
        let noise: [Numbers]
        let logits: [Logits]
        let choices: [Choice]
        let rows: [Row]
        let options: [Options]
    }

    func testNoiseIsThatOfPython() throws {
        let vectors = try Fixtures.read(Vectors.self, "sampling.json")
        for sample in vectors.philox {
            let (position, kind, seed) = (sample.position, sample.kind, UInt64(sample.seed)!)
            XCTAssertEqual(Noise.philox(sample.number, position: position, kind: kind, seed: seed), sample.words)
        }
        for sample in vectors.noise {
            let noise = Noise(seed: UInt64(sample.seed)!, position: sample.position, vocab: sample.ids.max()! + 1)
            for (id, wanted) in zip(sample.ids, sample.noise) {
                XCTAssertEqual(noise.of(id), wanted, accuracy: 1e-14 * max(1, abs(wanted)))
            }
        }
    }

    func testAnswersAreThoseOfPython() throws {
        let vectors = try Fixtures.read(Vectors.self, "sampling.json")
        for sample in vectors.logits { XCTAssertEqual(logits(5, row: sample.step % 3), sample.first) }
        XCTAssertGreaterThanOrEqual(vectors.choices.count, 100)
        for (number, sample) in vectors.choices.enumerated() {
            let (sampling, vocab) = (sample.sampling.made(seed: sample.seed), sample.vocab)
            var chooser = try Chooser(sampling, prompt: sample.prompt, stops: sample.stops, vocab: vocab)
            var tokens: [Int32] = []
            var left: [Int] = []
            for step in sample.tokens.indices {
                tokens.append(try chooser.choose(logits(vocab, row: UInt32(step % 3))))
                if sampling.temperature > 0 { left.append(chooser.left) }
            }
            XCTAssertEqual(tokens, sample.tokens, "case \(number)")
            XCTAssertEqual(left, sample.left, "case \(number)")
        }
    }

    func testExtremeLogitsAndOptionsEndAsInPython() throws {
        for (number, sample) in try Fixtures.read(Vectors.self, "sampling.json").rows.enumerated() {
            let logits = sample.logits.map { Float($0)! }
            let sampling = sample.sampling.made(seed: sample.seed)
            var chooser = try Chooser(sampling, prompt: sample.prompt, stops: sample.stops, vocab: logits.count)
            do {
                let token = try chooser.choose(logits)
                XCTAssertEqual(token, sample.token, "row \(number)")
            } catch BundleError.damaged {
                XCTAssertEqual("model", sample.refused, "row \(number)")
            } catch BundleError.request {
                XCTAssertEqual("request", sample.refused, "row \(number)")
            }
        }
    }

    func testOptionsOutsideOfTheirRangesAreRefusedAsInPython() throws {
        for sample in try Fixtures.read(Vectors.self, "sampling.json").options {
            XCTAssertThrowsError(try sample.sampling.made(seed: "0").check(vocab: 4)) {
                XCTAssertTrue($0.localizedDescription.contains(sample.message), $0.localizedDescription)
            }
        }
    }

    func testWhatCannotBeChosenIsAnError() throws {
        var wrong: [(Sampling, String)] = [
            (Sampling(temperature: -1), "temperature"), (Sampling(temperature: .nan), "temperature"),
        ]
        wrong.append((Sampling(), "topP"))
        wrong[2].0.topP = 0
        wrong.append((Sampling(), "token 7 is not one of the model's 7"))
        wrong[3].0.logitBias = [7: 1]
        for (sampling, message) in wrong {
            XCTAssertThrowsError(try Chooser(sampling, prompt: [1], stops: [0], vocab: 7)) {
                XCTAssertTrue($0.localizedDescription.contains(message), $0.localizedDescription)
            }
        }
        var chooser = try Chooser(Sampling(temperature: 1), prompt: [1], stops: [0], vocab: 3)
        for logits: [Float] in [[0, .nan, 0], [0, .infinity, 0]] {
            XCTAssertThrowsError(try chooser.choose(logits)) {
                let message = "the model returned logits that are not numbers, or too large to choose from"
                XCTAssertEqual($0 as? BundleError, .damaged(message))
            }
        }
        XCTAssertThrowsError(try chooser.choose([-.infinity, -.infinity, -.infinity]))
        XCTAssertEqual(try chooser.choose([-.infinity, 0, -.infinity]), 1)
    }
}
