import DemoModel
import SwiftUI

@main
struct DemoApp: App {
    /// Bundles are looked for in the app's documents and in what it was shipped with.
    static let places = [URL.documentsDirectory] + [Bundle.main.resourceURL].compactMap { $0 }

    @State private var model: DemoModel
    @State private var benchmark: BenchmarkModel

    init() {
        #if os(macOS)
            // A program started by `swift run` has no bundle that would make it an app with windows.
            NSApplication.shared.setActivationPolicy(.regular)
        #endif
        let model = DemoModel(places: Self.places)
        _model = State(initialValue: model)
        _benchmark = State(initialValue: BenchmarkModel(model, folder: .documentsDirectory))
    }

    var body: some Scene {
        WindowGroup {
            TabView {
                Tab("Chat", systemImage: "text.bubble") { ContentView(model: model, busy: benchmark.task != nil) }
                Tab("Benchmark", systemImage: "stopwatch") { BenchmarkView(model: benchmark, busy: model.task != nil) }
            }
            .onAppear { model.findBundles() }
        }
    }
}
