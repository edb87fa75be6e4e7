package backends

// dropped records the NaN and infinities that versions of cuDNN drop. A row has the form "k NaN: lse dv": a NaN in k
// does not reach LSE and dv, which the definition makes NaN or infinite. TestFusedNonFinite of package kernels/gpu
// measures the rows and holds them to this table. Other versions have not been measured.
var dropped = map[Version][]string{
	V(9, 19, 0): {},
}

// Dropped returns the rows of one version of cuDNN, and whether it has been measured.
func Dropped(cudnn Version) (rows []string, measured bool) {
	rows, measured = dropped[cudnn]
	return rows, measured
}

// fusedWarnings are rules that warn of cuDNN and do not reject it.
var fusedWarnings = []Rule{
	{ID: "fused-drops-nan", Backend: Fused, Warns: true, // kernels
		Speaks: func(c *Call) bool { return len(dropped[c.CUDNN]) > 0 },
		Reason: "This version of cuDNN drops some NaN and infinities of q, k, v or dO, so a broken run may look sound.",
		Fix:    "Set attention.backend to flash, which keeps them."},
}

// Warnings returns the rules that warn of the chosen backend.
func (c *Choice) Warnings() (list []Rejection) {
	for _, r := range rules {
		if r.Warns && r.Backend == c.Backend && r.Speaks(&c.Hops[0]) {
			list = append(list, Rejection{Backend: r.Backend, Rule: r.ID, Reason: r.Reason, Fix: r.Fix})
		}
	}
	return list
}
