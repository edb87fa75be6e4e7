package machine

import "strings"

// Card is a GPU for --assume gpu=, with the figures of its data sheet.
type Card struct {
	Key       string // h200
	Name      string // of the driver
	Arch      int
	Memory    int64   // available to a process
	Link      float64 // bytes/s from one GPU to others of its host
	BF16      float64 // FLOP/s of tensor cores, dense
	FP32      float64 // FLOP/s outside tensor cores
	Bandwidth float64 // bytes/s of its memory
}

const gib = 1 << 30

// cards are ordered by age; the first of an architecture represents unnamed cards. Sources: NVIDIA's data sheets,
// without sparsity; NVLink has half of its figure in each direction. Memory is the driver's figure, or the nominal size
// without ECC and the driver's share. RTX PRO 6000: an eighth of the 4 PFLOP/s of FP4 with sparsity.
var cards = []Card{
	{"a100-40g", "NVIDIA A100-SXM4-40GB", 80, 39 * gib, 300e9, 312e12, 19.5e12, 1555e9},
	{"a100", "NVIDIA A100-SXM4-80GB", 80, 79 * gib, 300e9, 312e12, 19.5e12, 2039e9},
	{"a40", "NVIDIA A40", 86, 44 * gib, 32e9, 149.7e12, 37.4e12, 696e9},
	{"l40s", "NVIDIA L40S", 89, 44 * gib, 32e9, 362e12, 91.6e12, 864e9},
	{"h100", "NVIDIA H100 80GB HBM3", 90, 79 * gib, 450e9, 989e12, 67e12, 3350e9},
	{"h100-pcie", "NVIDIA H100 PCIe", 90, 79 * gib, 64e9, 756e12, 51e12, 2000e9},
	{"h200", "NVIDIA H200", 90, 139 * gib, 450e9, 989e12, 67e12, 4800e9},
	{"b200", "NVIDIA B200", 100, 178 * gib, 900e9, 2250e12, 75e12, 8000e9},
	{"b300", "NVIDIA B300", 103, 267 * gib, 900e9, 2250e12, 75e12, 8000e9},
	{"rtx-pro-6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition", 120, 95 * gib, 64e9, 500e12, 125e12, 1597e9},
}

// CardOf returns the card with this key or driver name.
func CardOf(name string) (Card, bool) {
	for _, c := range cards {
		if strings.EqualFold(c.Key, name) || c.Name == name {
			return c, true
		}
	}
	return Card{}, false
}

// card returns the card with the machine's name, else the common one of its architecture.
func (m Machine) card() (Card, bool) {
	if c, ok := CardOf(m.Name); ok {
		return c, true
	}
	return CardFor(m.Arch)
}

// CardFor returns the common card of an architecture, or of the newest earlier one (a new GPU is at least as fast). ok
// is false before the first.
func CardFor(arch int) (card Card, ok bool) {
	for _, c := range cards {
		if c.Arch <= arch && c.Arch > card.Arch {
			card, ok = c, true
		}
	}
	return card, ok
}

// Against returns the ratios of this machine's compute and memory rates to another card's, by the data sheets; 1 if
// unknown.
func (m Machine) Against(name string) (flops, memory float64) {
	mine, ok := m.card()
	other, known := CardOf(name)
	if !ok || !known {
		return 1, 1
	}
	return mine.BF16 / other.BF16, mine.Bandwidth / other.Bandwidth
}

// Peak returns the FLOP/s behind MFU, in bf16 and fp16; 0: unknown.
func (m Machine) Peak() float64 {
	c, _ := m.card()
	return c.BF16
}
