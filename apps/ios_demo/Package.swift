// swift-tools-version: 6.0
import PackageDescription

let package = Package(
    name: "SSDeviceDemo",
    platforms: [.iOS(.v18), .macOS(.v15)],
    products: [
        .library(name: "SpeculativeDecoding", targets: ["SpeculativeDecoding"]),
        .library(name: "SpeculativeDecodingCoreML", targets: ["SpeculativeDecodingCoreML"]),
        .library(name: "DemoModel", targets: ["DemoModel"]),
    ],
    targets: [
        .target(name: "SpeculativeDecoding", resources: [.process("manifest.schema.json")]),
        .target(name: "SpeculativeDecodingCoreML", dependencies: ["SpeculativeDecoding"]),
        .target(name: "DemoModel", dependencies: ["SpeculativeDecodingCoreML"]),
        .testTarget(name: "SpeculativeDecodingTests", dependencies: ["SpeculativeDecoding"]),
        .testTarget(name: "SpeculativeDecodingCoreMLTests", dependencies: ["SpeculativeDecodingCoreML"]),
        .testTarget(name: "DemoModelTests", dependencies: ["DemoModel"]),
    ],
    swiftLanguageModes: [.v6]
)

#if os(Linux)
    // In place of Apple's framework: the part of its API that we use, on the project's interpreter of packages.
    package.targets.append(.target(name: "CoreML", path: "Tests/CoreMLStandIn"))
    for target in package.targets where target.name.hasPrefix("SpeculativeDecodingCoreML") {
        target.dependencies.append("CoreML")
    }
    // Tests hash megabytes again and again, which takes most of their time in debug builds.
    package.targets.first { $0.name == "SpeculativeDecoding" }?.swiftSettings = [.unsafeFlags(["-O"])]
    // The library of Swift 6.0 for Observation has a symbol that is nowhere defined.
    package.targets.first { $0.name == "DemoModelTests" }?.linkerSettings = [
        .unsafeFlags(["-Xlinker", "--allow-shlib-undefined"])
    ]
#else
    package.products.append(.executable(name: "Demo", targets: ["Demo"]))
    package.targets.append(.executableTarget(name: "Demo", dependencies: ["DemoModel"]))
#endif
