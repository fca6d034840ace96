//! Rows of a Parquet file as documents.

use std::fs::File;
use std::path::Path;

use anyhow::{Context, Result};
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::{Field, Row};
use serde_json::{Map, Value};

use crate::error::bad_input;

/// All rows of `path`: columns become fields, lists and groups as they are.
///
/// # Errors
/// `BadInput`: no Parquet file, or a damaged one; a column of a type that JSON has no form for.
pub fn read(path: &Path) -> Result<Vec<Value>> {
    let file = File::open(path).with_context(|| format!("opening {}", path.display()))?;
    let bad = |e: parquet::errors::ParquetError| bad_input(format!("{} cannot be read as Parquet: {e}", path.display()));
    let reader = SerializedFileReader::new(file).map_err(bad)?;
    let rows = reader.get_row_iter(None).map_err(bad)?;
    rows.enumerate().map(|(i, row)| object(&row.map_err(bad)?).with_context(|| format!("{}, row {i}", path.display()))).collect()
}

fn object(row: &Row) -> Result<Value> {
    let fields = row.get_column_iter().map(|(name, field)| Ok((name.clone(), value(field).with_context(|| name.clone())?)));
    Ok(Value::Object(fields.collect::<Result<Map<_, _>>>()?))
}

fn value(field: &Field) -> Result<Value> {
    Ok(match field {
        Field::Null => Value::Null,
        Field::Bool(b) => (*b).into(),
        Field::Byte(n) => (*n).into(),
        Field::Short(n) => (*n).into(),
        Field::Int(n) => (*n).into(),
        Field::Long(n) => (*n).into(),
        Field::UByte(n) => (*n).into(),
        Field::UShort(n) => (*n).into(),
        Field::UInt(n) => (*n).into(),
        Field::ULong(n) => (*n).into(),
        Field::Float16(x) => x.to_f32().into(),
        Field::Float(x) => (*x).into(),
        Field::Double(x) => (*x).into(),
        Field::Str(s) => s.clone().into(),
        Field::Bytes(b) => {
            let text = b.as_utf8().map_err(|_| bad_input("the column holds bytes that are no UTF-8 text"))?;
            text.into()
        }
        Field::Group(row) => object(row)?,
        Field::ListInternal(list) => list.elements().iter().map(value).collect::<Result<Vec<_>>>()?.into(),
        Field::MapInternal(map) => {
            let entries = map.entries().iter().map(|(k, v)| match k {
                Field::Str(k) => Ok((k.clone(), value(v)?)),
                other => Err(bad_input(format!("the key {other} is no text"))),
            });
            Value::Object(entries.collect::<Result<Map<_, _>>>()?)
        }
        other => return Err(bad_input(format!("the value {other} is of a type that documents do not have"))),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Files that pyarrow wrote, against the same rows as JSON.
    #[test]
    fn rows_are_those_that_pyarrow_wrote() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/eval");
        let want: Vec<Value> = serde_json::from_str(&std::fs::read_to_string(folder.join("rows.json")).unwrap()).unwrap();
        for packing in ["snappy", "zstd", "gzip"] {
            assert_eq!(read(&folder.join(format!("rows_{packing}.parquet"))).unwrap(), want, "{packing}");
        }
    }
}
