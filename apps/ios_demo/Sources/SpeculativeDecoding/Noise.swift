import Foundation

/// The noise of sampling: a function of seed, position and token, the same in every host. Python's
/// `ssdevice.runtime.sampling.noise` says what the numbers are and why.
struct Noise: Sendable {
    /// Tokens whose smallest exponential number is known without the others.
    static let group = 256

    private let seed: UInt64
    private let position: UInt32
    /// Of each group the smallest exponential number, the Gumbel number that it makes, and the token that has it, which may
    /// lie beyond the last group's tokens.
    private let groups: [(smallest: Double, most: Double, lucky: Int)]

    init(seed: UInt64, position: Int, vocab: Int) {
        self.seed = seed
        self.position = UInt32(truncatingIfNeeded: position)
        let at = self.position
        groups = (0..<(vocab + Self.group - 1) / Self.group).map { number in
            let words = Self.philox(UInt32(number), position: at, kind: 0, seed: seed)
            let smallest = Self.exponential(words[0], words[1]) / Double(Self.group)
            return (smallest, -log(smallest), number * Self.group + Int(words[2]) % Self.group)
        }
    }

    /// The Gumbel number of a token.
    func of(_ token: Int) -> Double {
        let (smallest, most, lucky) = groups[token / Self.group]
        if token == lucky { return most }
        let words = Self.philox(UInt32(token >> 1), position: position, kind: 1, seed: seed)
        let at = 2 * (token & 1)
        return -log(smallest + Self.exponential(words[at], words[at + 1]))
    }

    /// The largest number of a token's group.
    func most(near token: Int) -> Double { groups[token / Self.group].most }

    /// The 32-bit words of Philox 4x32-10 for the counter (number, position, kind, 0).
    static func philox(_ number: UInt32, position: UInt32, kind: UInt32, seed: UInt64) -> [UInt32] {
        var (a, b, c, d) = (number, position, kind, UInt32(0))
        var (key, other) = (UInt32(truncatingIfNeeded: seed), UInt32(truncatingIfNeeded: seed >> 32))
        for _ in 0..<10 {
            let p = UInt32(0xD251_1F53).multipliedFullWidth(by: a)
            let q = UInt32(0xCD9E_8D57).multipliedFullWidth(by: c)
            (a, b, c, d) = (q.high ^ b ^ key, q.low, p.high ^ d ^ other, p.low)
            (key, other) = (key &+ 0x9E37_79B9, other &+ 0xBB67_AE85)
        }
        return [a, b, c, d]
    }

    private static func exponential(_ word: UInt32, _ next: UInt32) -> Double {
        -log((Double(UInt64(word) << 20 | UInt64(next >> 12)) + 0.5) * 0x1p-52)
    }
}
