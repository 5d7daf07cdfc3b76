// swift-tools-version: 6.0
import PackageDescription

let package = Package(
    name: "SSDeviceDemo",
    platforms: [.iOS(.v18), .macOS(.v15)],
    products: [
        .library(name: "SpeculativeDecoding", targets: ["SpeculativeDecoding"]),
        .executable(name: "Demo", targets: ["Demo"]),
    ],
    targets: [
        .target(name: "SpeculativeDecoding"),
        .executableTarget(name: "Demo", dependencies: ["SpeculativeDecoding"]),
        .testTarget(name: "SpeculativeDecodingTests", dependencies: ["SpeculativeDecoding"]),
    ],
    swiftLanguageModes: [.v5]
)
