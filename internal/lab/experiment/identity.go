package experiment

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"strconv"

	"github.com/cprun/cprun/internal/model/config"
)

// Identity returns what another start must have alike, with the flags of the command that count. configs are
// those of the cells, in their order; one that has faults is nil.
func (e *Experiment) Identity(configs [][]byte, flags map[string]string) Identity {
	sum := sha256.New()
	for _, c := range configs {
		sum.Write(c)
		sum.Write([]byte{0})
	}
	id := Identity{
		"base": e.Base, "set": text(e.Set), "grid": text(e.Grid),
		"warmup": strconv.Itoa(e.Warmup), "repeat": strconv.Itoa(e.Repeat), "limit": config.FormatTime(e.Limit),
		"the cells' configs": hex.EncodeToString(sum.Sum(nil)),
	}
	for name, value := range flags {
		id[name] = value
	}
	return id
}

// text is plain fields as JSON, whose keys are sorted.
func text(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		panic("experiment: plain fields do not encode: " + err.Error())
	}
	return string(b)
}
