import Foundation

/// What can be wrong with a bundle or a request, in words for the person who made it.
public enum BundleError: LocalizedError, Equatable {
    case unreadable(String)
    case unsupported(String)
    case damaged(String)
    /// A prompt or an option that cannot be answered.
    case request(String)

    public var errorDescription: String? {
        switch self {
        case .unreadable(let what): "cannot read \(what)"
        case .unsupported(let what): "not supported: \(what)"
        case .damaged(let what): "damaged: \(what)"
        case .request(let what): what
        }
    }
}
