package hf

import (
	"bytes"
	"encoding/json"
	"math"
)

// An object is a JSON object whose values are read one by one, each with its type, so that
// every wrong one is reported.
type object struct {
	prefix string // of its keys in faults
	keys   map[string]json.RawMessage
	faults *faults
}

func (o object) has(key string) bool {
	raw, ok := o.keys[key]
	return ok && !bytes.Equal(bytes.TrimSpace(raw), []byte("null"))
}

func (o object) fault(key, format string, args ...any) {
	o.faults.add(o.prefix+key, format, args...)
}

// get decodes a key into v, which stays as it is where the key is absent or null.
func (o object) get(key, want string, v any) {
	if o.has(key) && json.Unmarshal(o.keys[key], v) != nil {
		o.fault(key, "%s where %s belongs", clip(o.keys[key]), want)
	}
}

func clip(raw []byte) []byte {
	if len(raw) > 60 {
		return append(bytes.Clone(raw[:57]), "..."...)
	}
	return raw
}

// maxInt bounds every length of a config, so that products of a few of them do not overflow.
const maxInt = 1 << 31

func (o object) integer(key string, missing int) int {
	v := missing
	o.get(key, "an integer", &v)
	if v < 0 || v > maxInt {
		o.fault(key, "%d is not from 0 to %d", v, maxInt)
		return missing
	}
	return v
}

func (o object) number(key string, missing float64) float64 {
	v := missing
	o.get(key, "a number", &v)
	if math.IsInf(v, 0) || math.IsNaN(v) {
		o.fault(key, "%v is not finite", v)
	}
	return v
}

func (o object) boolean(key string, missing bool) bool {
	v := missing
	o.get(key, "true or false", &v)
	return v
}

func (o object) text(key, missing string) string {
	v := missing
	o.get(key, "a string", &v)
	return v
}

// object returns a nested object; nil keys where it is absent, null or empty.
func (o object) object(key string) object {
	in := object{prefix: o.prefix + key + ".", faults: o.faults}
	o.get(key, "an object", &in.keys)
	return in
}
