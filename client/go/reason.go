package wald

// Reason is why the server refused: the reason of its ErrorInfo. It is an error, so that
// errors.Is(err, wald.ErrFenced) works. The constants come from the enum Reason of the contract
// (reasons.go, generated). A reason that this package does not name compares as
// wald.Reason("NEW_REASON").
type Reason string

// Error is the reason as the contract spells it.
func (r Reason) Error() string { return string(r) }
