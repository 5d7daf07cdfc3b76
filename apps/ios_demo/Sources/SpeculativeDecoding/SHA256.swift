import Foundation

#if canImport(CryptoKit)
    import CryptoKit
#else
    /// SHA-256 (FIPS 180-4), with the methods of CryptoKit's, for systems without it.
    struct SHA256 {
        private var state: [UInt32] = [
            0x6a09_e667, 0xbb67_ae85, 0x3c6e_f372, 0xa54f_f53a, 0x510e_527f, 0x9b05_688c, 0x1f83_d9ab, 0x5be0_cd19,
        ]
        private var rest: [UInt8] = []
        private var count = 0

        mutating func update(data: Data) {
            count += data.count
            rest.append(contentsOf: data)
            let whole = rest.count / 64 * 64
            rest.withUnsafeBufferPointer { bytes in
                for start in stride(from: 0, to: whole, by: 64) { Self.compress(&state, bytes, start) }
            }
            rest.removeFirst(whole)
        }

        func finalize() -> [UInt8] {
            var last = self
            let zeros = [UInt8](repeating: 0, count: (119 - count % 64) % 64)
            let bits = UInt64(count) * 8
            last.update(data: Data([0x80] + zeros + Self.bytes(bits)))
            return last.state.flatMap(Self.bytes)
        }

        private static func bytes(_ number: some FixedWidthInteger) -> [UInt8] {
            withUnsafeBytes(of: number.bigEndian, Array.init)
        }

        private static func compress(_ state: inout [UInt32], _ block: UnsafeBufferPointer<UInt8>, _ start: Int) {
            // Shifts that mask, because checked ones are slow in debug builds.
            func rotated(_ x: UInt32, _ by: UInt32) -> UInt32 { x &>> by | x &<< (32 &- by) }
            withUnsafeTemporaryAllocation(of: UInt32.self, capacity: 64) { w in
                for i in 0..<16 {
                    let at = start + 4 * i
                    w[i] = (0..<4).reduce(0) { $0 &<< 8 | UInt32(block[at + $1]) }
                }
                for i in 16..<64 {
                    let (x, y) = (w[i - 15], w[i - 2])
                    let s0 = rotated(x, 7) ^ rotated(x, 18) ^ x &>> 3
                    let s1 = rotated(y, 17) ^ rotated(y, 19) ^ y &>> 10
                    w[i] = w[i - 16] &+ s0 &+ w[i - 7] &+ s1
                }
                var (a, b, c, d) = (state[0], state[1], state[2], state[3])
                var (e, f, g, h) = (state[4], state[5], state[6], state[7])
                constants.withUnsafeBufferPointer { k in
                    for i in 0..<64 {
                        let s1 = rotated(e, 6) ^ rotated(e, 11) ^ rotated(e, 25)
                        let t1 = h &+ s1 &+ (e & f ^ ~e & g) &+ k[i] &+ w[i]
                        let s0 = rotated(a, 2) ^ rotated(a, 13) ^ rotated(a, 22)
                        let t2 = s0 &+ (a & b ^ a & c ^ b & c)
                        (h, g, f, e, d, c, b, a) = (g, f, e, d &+ t1, c, b, a, t1 &+ t2)
                    }
                }
                for (i, value) in [a, b, c, d, e, f, g, h].enumerated() { state[i] &+= value }
            }
        }

        /// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
        private static let constants: [UInt32] = [
            0x428a_2f98, 0x7137_4491, 0xb5c0_fbcf, 0xe9b5_dba5, 0x3956_c25b, 0x59f1_11f1, 0x923f_82a4, 0xab1c_5ed5,
            0xd807_aa98, 0x1283_5b01, 0x2431_85be, 0x550c_7dc3, 0x72be_5d74, 0x80de_b1fe, 0x9bdc_06a7, 0xc19b_f174,
            0xe49b_69c1, 0xefbe_4786, 0x0fc1_9dc6, 0x240c_a1cc, 0x2de9_2c6f, 0x4a74_84aa, 0x5cb0_a9dc, 0x76f9_88da,
            0x983e_5152, 0xa831_c66d, 0xb003_27c8, 0xbf59_7fc7, 0xc6e0_0bf3, 0xd5a7_9147, 0x06ca_6351, 0x1429_2967,
            0x27b7_0a85, 0x2e1b_2138, 0x4d2c_6dfc, 0x5338_0d13, 0x650a_7354, 0x766a_0abb, 0x81c2_c92e, 0x9272_2c85,
            0xa2bf_e8a1, 0xa81a_664b, 0xc24b_8b70, 0xc76c_51a3, 0xd192_e819, 0xd699_0624, 0xf40e_3585, 0x106a_a070,
            0x19a4_c116, 0x1e37_6c08, 0x2748_774c, 0x34b0_bcb5, 0x391c_0cb3, 0x4ed8_aa4a, 0x5b9c_ca4f, 0x682e_6ff3,
            0x748f_82ee, 0x78a5_636f, 0x84c8_7814, 0x8cc7_0208, 0x90be_fffa, 0xa450_6ceb, 0xbef9_a3f7, 0xc671_78f2,
        ]
    }
#endif

/// The SHA-256 of a file, read in pieces, as lowercase hexadecimal digits.
func sha256(of file: URL) throws -> String {
    let handle = try FileHandle(forReadingFrom: file)
    defer { try? handle.close() }
    var hash = SHA256()
    while let piece = try handle.read(upToCount: 1 << 20), !piece.isEmpty { hash.update(data: piece) }
    return digits(hash)
}

/// The same for bytes in memory.
func sha256(of data: Data) -> String {
    var hash = SHA256()
    hash.update(data: data)
    return digits(hash)
}

private func digits(_ hash: SHA256) -> String {
    hash.finalize().map { ($0 < 16 ? "0" : "") + String($0, radix: 16) }.joined()
}
