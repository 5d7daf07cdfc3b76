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

        let philox: [Words]
        let noise: [Numbers]
        let logits: [Logits]
        let choices: [Choice]
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
                XCTAssertEqual($0 as? BundleError, .damaged("the model returned logits that are not numbers"))
            }
        }
        XCTAssertThrowsError(try chooser.choose([-.infinity, -.infinity, -.infinity]))
        XCTAssertEqual(try chooser.choose([-.infinity, 0, -.infinity]), 1)
    }
}
