import SwiftUI

@main
struct DemoApp: App {
    #if os(macOS)
        // A program started by `swift run` has no bundle that would make it an app with windows.
        init() { NSApplication.shared.setActivationPolicy(.regular) }
    #endif

    var body: some Scene {
        WindowGroup {
            ContentView()
        }
    }
}
