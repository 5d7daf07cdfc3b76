import Foundation

/// A process of `tests/swift/interpreter.py` with one package: a line of JSON in, a line out.
final class Interpreter: @unchecked Sendable {
    private static let lock = NSLock()
    nonisolated(unsafe) private static var running: [URL: Interpreter] = [:]

    private let lock = NSLock()
    private let process = Process()
    private let input = Pipe()
    private let output = Pipe()

    static func of(_ package: URL) throws -> Interpreter {
        try lock.withLock {
            if let known = running[package] { return known }
            let started = try Interpreter(package)
            running[package] = started
            return started
        }
    }

    /// `make swift-test` writes `build/swift/interpreter`, which starts the repository's Python.
    private init(_ package: URL) throws {
        let repository = URL(filePath: #filePath).appending(path: "../../../../..").standardizedFileURL
        process.executableURL = repository.appending(path: "build/swift/interpreter")
        process.arguments = [package.path]
        process.standardInput = input
        process.standardOutput = output
        try process.run()
    }

    func ask(_ question: [String: Any]) throws -> [String: Any] {
        try lock.withLock {
            try input.fileHandleForWriting.write(contentsOf: JSONSerialization.data(withJSONObject: question) + [0x0A])
            let answer = try JSONSerialization.jsonObject(with: line()) as? [String: Any] ?? [:]
            if let problem = answer["error"] as? String {
                throw NSError(domain: "CoreML", code: 0, userInfo: [NSLocalizedDescriptionKey: problem])
            }
            return answer
        }
    }

    private func line() throws -> Data {
        var line = Data()
        while line.last != 0x0A {
            let more = output.fileHandleForReading.availableData
            guard !more.isEmpty else { throw CocoaError(.fileReadUnknown) }
            line += more
        }
        return line
    }
}
