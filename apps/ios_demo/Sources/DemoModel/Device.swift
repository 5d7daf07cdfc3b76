import Foundation

/// What the system says about the device and this app.
public struct Device: Sendable, Equatable {
    /// The app's most memory so far, in 10⁶ bytes.
    public let peakMB: Double
    /// In Apple's words: nominal, fair, serious or critical.
    public let thermalState: String
    public let lowPower: Bool

    /// Whether times count now.
    public var isFit: Bool { (thermalState == "nominal" || thermalState == "fair") && !lowPower }

    public static var now: Device {
        var usage = rusage()
        #if canImport(Darwin)
            getrusage(RUSAGE_SELF, &usage)
            let words: [ProcessInfo.ThermalState: String] = [
                .nominal: "nominal", .fair: "fair", .serious: "serious", .critical: "critical",
            ]
            return Device(
                peakMB: Double(usage.ru_maxrss) / 1e6,
                thermalState: words[ProcessInfo.processInfo.thermalState] ?? "unknown",
                lowPower: ProcessInfo.processInfo.isLowPowerModeEnabled
            )
        #else
            getrusage(Int32(RUSAGE_SELF.rawValue), &usage)
            return Device(peakMB: Double(usage.ru_maxrss) * 1024 / 1e6, thermalState: "nominal", lowPower: false)
        #endif
    }
}

/// The machine and its load averages over 1, 5 and 15 minutes, before a measurement and after it.
struct MachineLoad: Sendable {
    let before: [Double]
    let after = averages
    private let device = Device.now

    static var averages: [Double] {
        var found = [0.0, 0.0, 0.0]
        getloadavg(&found, 3)
        return found
    }

    /// The fields of `machine` in a report of `ssdevice bench`, and what only a device has.
    var json: [String: Any] {
        let process = ProcessInfo.processInfo
        return [
            "cpu": Self.name, "instructions": [String](), "cores": process.activeProcessorCount,
            "system": process.operatingSystemVersionString, "python": NSNull(), "others_cpu_share": NSNull(),
            "loadavg_before": before, "loadavg_after": after,
            "peak_rss_mb": device.peakMB, "thermal_state": device.thermalState,
        ]
    }

    /// Such as iPhone17,1.
    private static var name: String {
        var system = utsname()
        uname(&system)
        return withUnsafeBytes(of: &system.machine) { String(decoding: $0.prefix { $0 != 0 }, as: UTF8.self) }
    }
}
