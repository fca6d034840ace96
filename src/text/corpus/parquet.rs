//! Rows of Parquet: one column is the text, others may be asked for by conditions. One row group after the other, one page of
//! each column at a time.

use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;

use anyhow::{Result, anyhow};
use parquet::basic::{ConvertedType, Type};
use parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use parquet::data_type::{ByteArray, ByteArrayType, DataType};
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, RowGroupReader, SerializedFileReader};
use parquet::schema::types::{ColumnDescriptor, SchemaDescriptor};

use super::read::{BLOCK_BYTES, Batcher, Stop};
use super::{Content, Input, Place, Wanted};
use crate::error::{bad_input, did_you_mean};
use crate::text::filter::{Condition, Value};

/// Rows that are decoded at a time, at most.
const MOST_ROWS: usize = 4096;

fn open(input: &Input) -> Result<SerializedFileReader<File>> {
    let shown = input.path.display();
    let file = File::open(&input.path).map_err(|e| bad_input(format!("input {shown} cannot be read: {e}")))?;
    guarded(|| SerializedFileReader::new(file))
        .map_err(|why| anyhow!("input {shown} is truncated, damaged, or no Parquet ({why}). Fetch it again, or leave it out"))
}

/// A damaged file should end with a sentence, also where the decoder does not expect the damage.
fn guarded<T>(f: impl FnOnce() -> Result<T, ParquetError>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(result) => result.map_err(|e| e.to_string()),
        Err(panic) => Err(format!("its decoder stopped: {}", crate::error::panic_text(&*panic))),
    }
}

/// Refuses a file without the columns that are asked for, or with columns of other types.
pub(super) fn check(input: &Input, field: &str, keep: &[Condition]) -> Result<()> {
    let reader = open(input)?;
    let schema = reader.metadata().file_metadata().schema_descr();
    column(input, schema, field, "--field", |c| c.physical_type() == Type::BYTE_ARRAY)?;
    for condition in keep {
        column(input, schema, condition.field(), "--keep", is_value)?;
    }
    Ok(())
}

/// Numbers, truth values and text; decimal numbers are whole numbers of another unit in the file.
fn is_value(column: &ColumnDescriptor) -> bool {
    let plain = matches!(
        column.physical_type(),
        Type::BOOLEAN | Type::INT32 | Type::INT64 | Type::FLOAT | Type::DOUBLE | Type::BYTE_ARRAY
    );
    plain && column.converted_type() != ConvertedType::DECIMAL
}

/// Index of the column of this name, such as `text` or `meta.score`.
fn column(
    input: &Input,
    schema: &SchemaDescriptor,
    name: &str,
    option: &str,
    fits: fn(&ColumnDescriptor) -> bool,
) -> Result<usize> {
    let shown = input.path.display();
    let names: Vec<String> = schema.columns().iter().map(|c| c.path().string()).collect();
    let Some(index) = names.iter().position(|n| n == name) else {
        let guess = did_you_mean(name, names.iter().map(String::as_str));
        return Err(bad_input(format!(
            "input {shown} has no column `{name}`{guess}; name one by {option}: {}",
            names.join(", ")
        )));
    };
    let column = schema.column(index);
    if column.max_rep_level() > 0 || !fits(&column) {
        let list = if column.max_rep_level() > 0 { "a list of " } else { "" };
        return Err(bad_input(format!(
            "input {shown}: column `{name}` ({option}) is {list}{}, which cannot be used so",
            column.physical_type()
        )));
    }
    Ok(index)
}

/// Rows of a file from `start` on.
pub(super) fn read_rows(input: &Input, start: Place, wanted: &Wanted, out: &mut Batcher) -> Result<(), Stop> {
    let reader = open(input).map_err(Stop::Failed)?;
    let metadata = reader.metadata();
    let schema = metadata.file_metadata().schema_descr();
    let find = |name: &str, option: &str| column(input, schema, name, option, |_| true).map_err(Stop::Failed);
    let text = find(&wanted.field, "--field")?;
    let fields = wanted.keep.iter().map(|c| find(c.field(), "--keep")).collect::<Result<Vec<_>, Stop>>()?;
    let rows_of = |g: usize| metadata.row_group(g).num_rows().max(0) as u64;
    let all_rows: u64 = (0..metadata.num_row_groups()).map(rows_of).sum();
    let skip = start.line.saturating_sub(1);
    // Rows before the group.
    let mut before = 0;
    for g in 0..metadata.num_row_groups() {
        let in_group = rows_of(g);
        let mut row = skip.saturating_sub(before).min(in_group);
        if row < in_group {
            let damaged = |row: u64| move |why: String| Stop::Failed(explain(input, g, before + row, &why));
            let group = guarded(|| reader.get_row_group(g)).map_err(damaged(0))?;
            let mut columns = Columns::open(&*group, text, &fields).map_err(damaged(0))?;
            columns.skip(row as usize).map_err(damaged(0))?;
            let bytes_a_row = group.metadata().column(text).uncompressed_size().max(1) as u64 / in_group;
            let at_once = (BLOCK_BYTES as u64 / bytes_a_row.max(1)).clamp(1, MOST_ROWS as u64);
            while row < in_group {
                let texts = columns.read(at_once.min(in_group - row) as usize).map_err(damaged(row))?;
                for (i, text) in texts.iter().enumerate() {
                    // Records of other small files, which have no columns, may stand before in the block.
                    let before_this = out.block.records.len() * columns.fields.len();
                    out.block.fields.resize(before_this, Value::Absent);
                    out.block.fields.extend(columns.fields.iter().map(|f| f.values[i].clone()));
                    let place = Place { line: before + row + i as u64 + 1, byte: 0, ..start };
                    push(place, text.as_ref().map(ByteArray::data), wanted.max_record_bytes, out)?;
                }
                row += texts.len() as u64;
                let read = u128::from(input.file_bytes) * u128::from(before + row) / u128::from(all_rows);
                out.count.store(read as u64, Ordering::Relaxed);
            }
        }
        before += in_group;
    }
    Ok(())
}

fn push(place: Place, text: Option<&[u8]>, most: u64, out: &mut Batcher) -> Result<(), Stop> {
    let start = out.len();
    let content = match text {
        None => Content::Null,
        Some(text) if text.len() as u64 > most => Content::TooLong(text.len() as u64),
        Some(text) => {
            out.append(start, text)?;
            Content::Bytes(start..out.len())
        }
    };
    out.push(place, content)
}

fn explain(input: &Input, group: usize, rows: u64, why: &str) -> anyhow::Error {
    anyhow!(
        "input {} is damaged: row group {group} cannot be decoded ({why}); {rows} complete documents of this file lie before that \
         point. Fetch it again, or leave it out",
        input.path.display()
    )
}

/// The columns of one row group that are read.
struct Columns {
    text: ColumnReaderImpl<ByteArrayType>,
    text_level: i16,
    fields: Vec<Field>,
}

/// A column that a condition looks at.
struct Field {
    reader: ColumnReader,
    /// Definition level of a value that is there.
    level: i16,
    /// Of the rows read last.
    values: Vec<Value>,
}

impl Columns {
    fn open(group: &dyn RowGroupReader, text: usize, fields: &[usize]) -> Result<Self, String> {
        let level = |i: usize| group.metadata().column(i).column_descr().max_def_level();
        let ColumnReader::ByteArrayColumnReader(reader) = guarded(|| group.get_column_reader(text))? else {
            return Err("its text is no text in this row group".into());
        };
        let field =
            |i: &usize| Ok(Field { reader: guarded(|| group.get_column_reader(*i))?, level: level(*i), values: Vec::new() });
        Ok(Self { text: reader, text_level: level(text), fields: fields.iter().map(field).collect::<Result<_, String>>()? })
    }

    fn skip(&mut self, rows: usize) -> Result<(), String> {
        if rows == 0 {
            return Ok(());
        }
        guarded(|| self.text.skip_records(rows))?;
        for field in &mut self.fields {
            guarded(|| match &mut field.reader {
                ColumnReader::BoolColumnReader(r) => r.skip_records(rows),
                ColumnReader::Int32ColumnReader(r) => r.skip_records(rows),
                ColumnReader::Int64ColumnReader(r) => r.skip_records(rows),
                ColumnReader::FloatColumnReader(r) => r.skip_records(rows),
                ColumnReader::DoubleColumnReader(r) => r.skip_records(rows),
                ColumnReader::ByteArrayColumnReader(r) => r.skip_records(rows),
                ColumnReader::Int96ColumnReader(_) | ColumnReader::FixedLenByteArrayColumnReader(_) => Ok(rows),
            })?;
        }
        Ok(())
    }

    /// The next `rows` texts; those of the fields lie in `fields`.
    fn read(&mut self, rows: usize) -> Result<Vec<Option<ByteArray>>, String> {
        for field in &mut self.fields {
            field.values = guarded(|| field.read(rows))?;
        }
        guarded(|| read(&mut self.text, self.text_level, rows))
    }
}

impl Field {
    fn read(&mut self, rows: usize) -> Result<Vec<Value>, ParquetError> {
        fn to_values<T>(found: Vec<Option<T>>, value: impl Fn(T) -> Value) -> Vec<Value> {
            found.into_iter().map(|v| v.map_or(Value::Absent, &value)).collect()
        }
        let level = self.level;
        Ok(match &mut self.reader {
            ColumnReader::BoolColumnReader(r) => to_values(read(r, level, rows)?, Value::Bool),
            ColumnReader::Int32ColumnReader(r) => to_values(read(r, level, rows)?, |n| Value::Number(n.into())),
            ColumnReader::Int64ColumnReader(r) => to_values(read(r, level, rows)?, |n| Value::Number(n as f64)),
            ColumnReader::FloatColumnReader(r) => to_values(read(r, level, rows)?, |n| Value::Number(n.into())),
            ColumnReader::DoubleColumnReader(r) => to_values(read(r, level, rows)?, Value::Number),
            ColumnReader::ByteArrayColumnReader(r) => {
                to_values(read(r, level, rows)?, |b: ByteArray| Value::Text(String::from_utf8_lossy(b.data()).into_owned()))
            }
            // `check` has refused them.
            ColumnReader::Int96ColumnReader(_) | ColumnReader::FixedLenByteArrayColumnReader(_) => vec![Value::Absent; rows],
        })
    }
}

/// Exactly `rows` values of a column that does not repeat, None where there is no value.
fn read<T: DataType>(reader: &mut ColumnReaderImpl<T>, level: i16, rows: usize) -> Result<Vec<Option<T::T>>, ParquetError> {
    let (mut levels, mut values, mut count) = (Vec::with_capacity(rows), Vec::with_capacity(rows), 0);
    while count < rows {
        let (records, ..) = reader.read_records(rows - count, Some(&mut levels), None, &mut values)?;
        if records == 0 {
            return Err(ParquetError::EOF("a column has fewer values than the row group has rows".into()));
        }
        count += records;
    }
    if level == 0 {
        return Ok(values.into_iter().map(Some).collect());
    }
    let mut values = values.into_iter();
    Ok(levels.into_iter().map(|l| if l == level { values.next() } else { None }).collect())
}
