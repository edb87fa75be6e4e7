package machine

// Peak is what the data sheet of one common GPU of an architecture promises.
type Peak struct {
	Arch   int
	GPU    string
	BF16   float64 // FLOP/s of tensor cores, bf16 and fp16, dense
	FP32   float64 // FLOP/s outside tensor cores
	Link   float64 // bytes/s that one GPU sends to others of its host
	Source string
}

// Peaks by architecture. docs/backends.md shows the table.
var Peaks = []Peak{
	{80, "A100 SXM", 312e12, 19.5e12, 300e9, "NVIDIA A100 data sheet; NVLink 3, 600 GB/s in both directions together"},
	{86, "A40", 149.7e12, 37.4e12, 32e9, "NVIDIA A40 data sheet; PCIe 4.0 x16"},
	{89, "L40S", 362e12, 91.6e12, 32e9, "NVIDIA L40S data sheet, without sparsity; PCIe 4.0 x16"},
	{90, "H100 and H200 SXM", 989e12, 67e12, 450e9, "NVIDIA H100 data sheet, without sparsity; NVLink 4, 900 GB/s in both directions together"},
	{100, "B200", 2250e12, 75e12, 900e9, "NVIDIA HGX B200 data sheet, without sparsity; NVLink 5, 1,800 GB/s in both directions together"},
	{103, "B300", 2250e12, 75e12, 900e9, "NVIDIA HGX B300 data sheet, without sparsity; NVLink 5, 1,800 GB/s in both directions together"},
	{120, "RTX PRO 6000 Blackwell", 500e12, 125e12, 64e9, "NVIDIA RTX PRO 6000 Blackwell data sheet: 4 PFLOP/s of FP4 with sparsity, of which bf16 without is an eighth; PCIe 5.0 x16"},
}

// PeakOf returns the row of an architecture, or of the newest one of those before it in the table
// (a new GPU is at least as fast); false below the first.
func PeakOf(arch int) (p Peak, ok bool) {
	for _, row := range Peaks {
		if row.Arch <= arch {
			p, ok = row, true
		}
	}
	return p, ok
}
